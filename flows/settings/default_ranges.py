"""The ranges of `nightjar tune` for a config without `tuning.ranges`: the settings that usually matter most for this config."""

from typing import Any

from flows.settings.pipeline import PipelineConfig
from tasks.tuning.config import RangeConfig


def default_ranges(config: PipelineConfig) -> dict[str, RangeConfig]:
    """Return the ranges by setting. The value of the config is in each range of choices.

    The temperature is first: on a dense log 0.2 to 0.3 is best, on a sparse one 0.1 or less. The learning rate of the tables
    decides how many epochs the training needs.
    """
    ranges: dict[str, RangeConfig] = {
        "model.temperature": RangeConfig(low=0.05, high=0.5, log=True),
        "training.table_optimizer.learning_rate": RangeConfig(low=0.01, high=0.3, log=True),
        "model.query.dropout": RangeConfig(low=0.0, high=0.5, step=0.1),
    }
    history = config.model.history
    if history.length:
        ranges["model.history.length"] = _choices(history.length, 10, 20, 50)
        if config.interactions.is_ordered:
            ranges["model.history.pooling"] = _choices(history.pooling, "mean", "recency")
        if config.embeddings or (config.features is not None and config.features.items is not None):
            ranges["model.history.item_representation"] = _choices(history.item_representation, "embedding", "candidate_tower")
    if config.loss.kind == "softmax":
        ranges["loss.num_negatives"] = _choices(config.loss.num_negatives, 512, 2048)
    return ranges


def _choices(current: Any, *usual: Any) -> RangeConfig:
    """Return the usual values and the current one."""
    return RangeConfig(choices=tuple(dict.fromkeys((*usual, current))))
