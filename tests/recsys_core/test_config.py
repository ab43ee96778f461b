"""Settings that do not change the result, and what they leave in a fingerprint."""

from typing import Annotated

from recsys_core.config import OPERATIONAL, Settings
from recsys_core.data.embeddings.config import EmbeddingsConfig
from recsys_core.data.interactions.config import InteractionsConfig
from recsys_core.training.config import TrainingConfig


class Example(Settings):
    rows: int = 1
    threads: Annotated[int | None, OPERATIONAL] = None


def test_operational_settings_are_not_part_of_the_fingerprint() -> None:
    assert Example.operational() == {"threads"}
    assert Example(rows=2, threads=3).result_settings() == {"rows": 2} == Example(rows=2).result_settings()


def test_seeds_columns_and_sizes_are_never_operational() -> None:
    for config, changing in ((TrainingConfig, {"seed", "epochs", "precision"}), (InteractionsConfig, {"paths", "split"})):
        assert config.operational() and not config.operational() & changing
    assert EmbeddingsConfig.operational() == {"batch_rows", "threads", "max_expansion_ratio"}
