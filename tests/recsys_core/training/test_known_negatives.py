"""Training with known negatives on a log in which most users reject half of the items."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recsys_core.evaluation.config import EvaluationConfig
from recsys_core.evaluation.evaluate import evaluate
from recsys_core.ingest.log.config import InteractionsConfig
from recsys_core.ingest.log.ingest import ingest_interactions
from recsys_core.manifests import Dataset
from recsys_core.models.config import TwoTowerConfig
from recsys_core.models.history_config import RecencyHistory
from recsys_core.models.loss.loss_config import LossConfig
from recsys_core.models.tables.table_config import DenseOptimizer, TableOptimizer
from recsys_core.training.config import TrainingConfig
from recsys_core.units import DAY_US
from tests.recsys_core.ingest.parquet_files import write_parquet
from tests.recsys_core.training.forked_training import (
    checkpoint_of,
    export_in_forks,
    make_experiment,
    train_in_forks,
    without_timings,
    write_export,
)

NUM_USERS, NUM_GENRES, ITEMS_PER_GENRE, EVENTS_PER_USER = 600, 10, 50, 24
MODEL = TwoTowerConfig(embedding_dim=16, history=RecencyHistory(length=8))
TRAINING = TrainingConfig(
    epochs=6,
    batch_size=256,
    table_optimizer=TableOptimizer(learning_rate=0.15, warmup_steps=5),
    dense_optimizer=DenseOptimizer(warmup_steps=5),
    validation=None,
    seed=3,
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Each user sees items of one genre. Four of five users reject items with an odd number, one of five the other items."""
    folder, random = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    genre_E = np.repeat(np.arange(NUM_USERS) % NUM_GENRES, EVENTS_PER_USER)
    number_E = random.permuted(np.tile(np.arange(ITEMS_PER_GENRE), (NUM_USERS, 1)), axis=1)[:, :EVENTS_PER_USER].ravel()
    is_rejected_E = random.random(len(number_E)) < np.where(number_E % 2, 0.8, 0.2)
    log_path = write_parquet(
        folder / "log.parquet",
        user_id=np.repeat(np.arange(NUM_USERS), EVENTS_PER_USER),
        item_id=genre_E * ITEMS_PER_GENRE + number_E,
        t=random.integers(0, 20 * DAY_US, len(number_E)),
        clicked=~is_rejected_E,
    )
    config = InteractionsConfig(
        paths=(log_path,),
        timestamp_column="t",
        timestamp_unit="us",
        label_column="clicked",
        label_threshold=1,
        explicit_negatives=True,
        split={"kind": "time", "test_days": 2, "validation_days": 1},
    )
    return Dataset(ingest_interactions(config, embeddings=None, folder=folder / "interactions"))


def loss_of(kind: str, **settings: Any) -> LossConfig:
    return LossConfig.model_validate({"kind": kind, "num_negatives": 128, "margin": 0.3, "negative_weight": 10, **settings})


def train_and_measure(dataset: Dataset, folder: Path, *, loss: LossConfig) -> dict[str, float]:
    """Return the recall and the share of known negatives among the first 10 items on the test split."""
    folder.mkdir()
    experiment = make_experiment(dataset, folder / "plan", model=MODEL, training=TRAINING, loss=loss, world_size=1)
    export = write_export(experiment, train_in_forks(experiment, folder / "work"), folder / "export")
    config = EvaluationConfig(baselines=(), ks=(10,))
    evaluation = evaluate(config, export=export, dataset=dataset, folder=folder / "evaluation")
    return {name: evaluation.metrics[f"test/{name}@10"] for name in ("recall", "known_negatives")}


@pytest.mark.parametrize(
    ("kind", "explicit_negative_weight"),
    [
        ("softmax", 10),
        ("bce", 3),
        pytest.param("bpr", 3, marks=pytest.mark.drill),
        pytest.param("cosine_contrastive", 3, marks=pytest.mark.drill),
    ],
)
def test_known_negatives_are_recommended_less_often_at_the_same_recall(
    kind: str, explicit_negative_weight: float, dataset: Dataset, tmp_path: Path
) -> None:
    metrics_without_known_negatives = train_and_measure(dataset, tmp_path / "without", loss=loss_of(kind))
    loss = loss_of(kind, explicit_negatives=4, explicit_negative_weight=explicit_negative_weight)
    metrics_with_known_negatives = train_and_measure(dataset, tmp_path / "with known negatives", loss=loss)
    assert metrics_with_known_negatives["known_negatives"] < 0.96 * metrics_without_known_negatives["known_negatives"]
    assert metrics_with_known_negatives["recall"] > 0.95 * metrics_without_known_negatives["recall"]


def test_on_two_ranks_a_stopped_training_equals_an_undisturbed_training_bit_for_bit(dataset: Dataset, tmp_path: Path) -> None:
    loss = loss_of("bce", explicit_negatives=3)
    training = TRAINING.model_copy(update={"epochs": 1, "batch_size": 128, "checkpoint_every_steps": 5})
    experiment = make_experiment(dataset, tmp_path / "plan", model=MODEL, training=training, loss=loss)
    undisturbed_training = train_in_forks(experiment, tmp_path / "undisturbed")
    train_in_forks(experiment, tmp_path / "stopped", stop_after_step=12)
    resumed_training = train_in_forks(experiment, tmp_path / "stopped")
    assert without_timings(resumed_training.lines) == without_timings(undisturbed_training.lines)
    expected_export = export_in_forks(experiment, checkpoint_of(undisturbed_training), tmp_path / "undisturbed export")
    resumed_export = export_in_forks(experiment, checkpoint_of(resumed_training), tmp_path / "resumed export")
    assert resumed_export.keys() == expected_export.keys()
    for name, expected_array in expected_export.items():
        np.testing.assert_array_equal(resumed_export[name], expected_array, err_msg=name)
