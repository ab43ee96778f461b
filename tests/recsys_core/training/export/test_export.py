"""Rankings that the export writes, compared with rankings of the evaluation: two gloo ranks on an ingested log."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from recsys_core.dataset.events import EventStore
from recsys_core.evaluation.config import EvaluationConfig
from recsys_core.evaluation.evaluate import evaluate
from recsys_core.evaluation.held_out import ranking_settings
from recsys_core.manifests import Dataset, EvaluationManifest, ExportManifest
from recsys_core.models.score_config import LearnedPopularity
from recsys_core.models.score_terms import item_popularity
from recsys_core.training.config import TrainingConfig
from tests.recsys_core.training.forked_training import (
    MODEL,
    Experiment,
    FinishedTraining,
    exported,
    generate_dataset,
    make_experiment,
    train_in_forks,
)

ALL_METRICS = EvaluationConfig(ks=(5, 20))
TOP_LISTS = EvaluationConfig(ks=(3,), metrics=("recall", "ndcg"), exclude_seen=False, max_users=40)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return generate_dataset(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def trained_model(data: Dataset, tmp_path_factory: pytest.TempPathFactory) -> tuple[Experiment, FinishedTraining]:
    """Train a model with a popularity term, and without user embeddings: it does not know users without a history."""
    folder = tmp_path_factory.mktemp("training")
    model = MODEL.model_copy(update={"learn_user_embedding": False, "popularity": LearnedPopularity()})
    experiment = make_experiment(data, folder / "plan", model=model, training=TrainingConfig(epochs=1, batch_size=256))
    return experiment, train_in_forks(experiment, folder / "work")


def _evaluate(config: EvaluationConfig, export: ExportManifest, data: Dataset, folder: Path) -> EvaluationManifest:
    return evaluate(config, export=export, dataset=data, folder=folder)


def test_eight_shards_on_four_ranks_train_the_model_of_one_shard_and_have_its_metrics(tmp_path: Path) -> None:
    manifests, layers = {}, {}
    for shards in (1, 8):
        folder = tmp_path / f"{shards} shards"
        folder.mkdir()
        ingested = generate_dataset(folder, shards=shards)
        data = Dataset(ingested.interactions, ingested.embeddings)  # the tables of the features have fewer rows than ranks
        training = TrainingConfig(epochs=1, batch_size=256)
        experiment = make_experiment(data, folder / "plan", model=MODEL, training=training, world_size=4)
        finished_training = train_in_forks(experiment, folder / "work")
        export = exported(experiment, finished_training, folder / "export", ranking=ranking_settings(ALL_METRICS))
        manifests[shards] = _evaluate(ALL_METRICS, export, data, folder / "evaluation")
        layers[shards] = {name: record for name, record in export.files.items() if name != "model.json"}
        assert data.interactions.num_shards == shards
    assert layers[1] == layers[8]  # vectors, tables, layers and rankings, bit by bit
    one, eight = manifests[1], manifests[8]
    assert (one.metrics, one.slices, one.half_widths) == (eight.metrics, eight.slices, eight.half_widths)
    assert one.metrics["test/users"] > 50
    for name in ("positions.parquet", "user_metrics.parquet", "popularity.npy"):
        assert one.path(name).read_bytes() == eight.path(name).read_bytes()


@pytest.mark.parametrize("config", [ALL_METRICS, TOP_LISTS], ids=["all metrics", "top lists"])
def test_the_evaluation_of_stored_rankings_equals_that_of_the_vectors(
    config: EvaluationConfig, data: Dataset, trained_model: tuple[Experiment, FinishedTraining], tmp_path: Path
) -> None:
    export = exported(*trained_model, tmp_path / "export", ranking=ranking_settings(config))
    without_rankings = export.model_copy(update={"ranking": None})
    stored = _evaluate(config, export, data, tmp_path / "stored")
    computed = _evaluate(config, without_rankings, data, tmp_path / "computed")
    assert stored.metrics == computed.metrics and stored.slices == computed.slices
    assert {"test/users", "validation/users"} <= stored.metrics.keys()
    assert config is TOP_LISTS or "test/cold/users" in stored.metrics  # the sample has no user with a cold target
    for name in ("positions.parquet", "user_metrics.parquet", "metrics.json"):
        assert stored.path(name).read_bytes() == computed.path(name).read_bytes()


def test_stored_rankings_are_read_only_if_they_have_the_settings_of_the_evaluation(
    data: Dataset,
    trained_model: tuple[Experiment, FinishedTraining],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    export = exported(*trained_model, tmp_path / "export", ranking=ranking_settings(ALL_METRICS))
    for name in ("item_vectors.npy", "query_vectors_test.npy", "query_vectors_validation.npy"):
        (export.folder / name).rename(tmp_path / name)
    _evaluate(ALL_METRICS, export, data, tmp_path / "same")  # it needs no vector
    for name in ("item_vectors.npy", "query_vectors_test.npy", "query_vectors_validation.npy"):
        (tmp_path / name).rename(export.folder / name)
    longer = ALL_METRICS.model_copy(update={"ks": (5, 60)})
    with caplog.at_level("INFO"):
        metrics = _evaluate(longer, export, data, tmp_path / "longer").metrics
    assert "the settings of the evaluation have changed since the export" in caplog.text
    assert metrics == _evaluate(longer, export.model_copy(update={"ranking": None}), data, tmp_path / "again").metrics


def test_the_vectors_end_in_the_trained_weight_and_in_the_popularity(
    data: Dataset, trained_model: tuple[Experiment, FinishedTraining], tmp_path: Path
) -> None:
    export = exported(*trained_model, tmp_path / "export")
    item_vectors, queries = (np.load(export.path(name)) for name in ("item_vectors.npy", "query_vectors_test.npy"))
    popularity_I = item_popularity(EventStore.open(data.interactions).train_count_I)
    assert np.array_equal(item_vectors[:, -1], popularity_I) and export.dim == item_vectors.shape[1]
    weight = load_file(export.path("dense.safetensors"))["query.popularity.weight"].item()
    assert abs(weight) > 1e-4 and np.array_equal(np.unique(queries[:, -1]), [np.float32(weight)])
