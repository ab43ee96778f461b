"""Rankings that the export writes on several gloo ranks, compared with rankings that the evaluation computes."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from recsys_core.dataset.events import EventStore
from recsys_core.evaluation.baselines import ZeroShot
from recsys_core.evaluation.config import EvaluationConfig
from recsys_core.evaluation.evaluate import evaluate
from recsys_core.evaluation.held_out import ranking_settings
from recsys_core.manifests import Dataset
from recsys_core.models.score_config import LearnedPopularity
from recsys_core.models.score_terms import item_popularity
from recsys_core.training.config import TrainingConfig
from tests.recsys_core.training.forked_training import (
    MODEL,
    Experiment,
    FinishedTraining,
    generate_dataset,
    make_experiment,
    train_in_forks,
    write_export,
)

ALL_METRICS = EvaluationConfig(ks=(5, 20))
TOP_LISTS = EvaluationConfig(ks=(3,), metrics=("recall", "ndcg"), exclude_seen=False, max_users=40)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return generate_dataset(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def trained_model(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> tuple[Experiment, FinishedTraining]:
    """A trained model with a popularity term. It has no user embeddings, so it does not know users without a history."""
    folder = tmp_path_factory.mktemp("training")
    model = MODEL.model_copy(update={"learn_user_embedding": False, "popularity": LearnedPopularity()})
    experiment = make_experiment(dataset, folder / "plan", model=model, training=TrainingConfig(epochs=1, batch_size=256))
    return experiment, train_in_forks(experiment, folder / "work")


def test_data_shards_and_four_ranks_change_no_metric(tmp_path: Path) -> None:
    evaluations, exported_files = {}, {}
    for num_shards in (1, 8):
        folder = tmp_path / f"{num_shards} shards"
        folder.mkdir()
        dataset_with_features = generate_dataset(folder, num_shards=num_shards)
        # Without features, because some of their tables have fewer rows than there are ranks.
        dataset = Dataset(dataset_with_features.interactions, dataset_with_features.embeddings)
        training = TrainingConfig(epochs=1, batch_size=256)
        experiment = make_experiment(dataset, folder / "plan", model=MODEL, training=training, world_size=4)
        finished_training = train_in_forks(experiment, folder / "work")
        export = write_export(experiment, finished_training, folder / "export", ranking=ranking_settings(ALL_METRICS))
        evaluations[num_shards] = evaluate(ALL_METRICS, export=export, dataset=dataset, folder=folder / "evaluation")
        exported_files[num_shards] = {name: record for name, record in export.files.items() if name != "model.json"}
        assert dataset.interactions.num_shards == num_shards
    assert exported_files[1] == exported_files[8]  # checksums of vectors, tables, layers and rankings
    one_shard, eight_shards = evaluations[1], evaluations[8]
    for field in ("metrics", "slices", "half_widths"):
        assert getattr(one_shard, field) == getattr(eight_shards, field)
    assert one_shard.metrics["test/users"] > 50
    export_without_rankings = export.model_copy(update={"ranking": None})
    in_one_process = evaluate(ALL_METRICS, export=export_without_rankings, dataset=dataset, folder=folder / "one process")
    assert in_one_process.metrics == eight_shards.metrics
    for name in ("positions.parquet", "user_metrics.parquet", "popularity.npy"):
        assert one_shard.path(name).read_bytes() == eight_shards.path(name).read_bytes()
        assert in_one_process.path(name).read_bytes() == eight_shards.path(name).read_bytes()


@pytest.mark.parametrize("config", [ALL_METRICS, TOP_LISTS], ids=["all metrics", "top lists"])
def test_the_evaluation_of_stored_rankings_equals_the_evaluation_of_vectors(
    config: EvaluationConfig, dataset: Dataset, trained_model: tuple[Experiment, FinishedTraining], tmp_path: Path
) -> None:
    export = write_export(*trained_model, tmp_path / "export", ranking=ranking_settings(config))
    export_without_rankings = export.model_copy(update={"ranking": None})
    stored = evaluate(config, export=export, dataset=dataset, folder=tmp_path / "stored")
    computed = evaluate(config, export=export_without_rankings, dataset=dataset, folder=tmp_path / "computed")
    assert stored.metrics == computed.metrics and stored.slices == computed.slices
    assert {"test/users", "validation/users", f"baseline/zero_shot/recall@{config.ks[0]}"} <= stored.metrics.keys()
    assert config is TOP_LISTS or "test/cold/users" in stored.metrics  # the 40 sampled users have no cold target
    for name in ("positions.parquet", "user_metrics.parquet", "metrics.json"):
        assert stored.path(name).read_bytes() == computed.path(name).read_bytes()


def test_stored_rankings_are_used_only_if_they_have_the_settings_of_the_evaluation(
    dataset: Dataset,
    trained_model: tuple[Experiment, FinishedTraining],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    export = write_export(*trained_model, tmp_path / "export", ranking=ranking_settings(ALL_METRICS))
    vector_files = ("item_vectors.npy", "query_vectors_test.npy", "query_vectors_validation.npy")
    for name in vector_files:
        (export.folder / name).rename(tmp_path / name)
    with monkeypatch.context() as without_zero_shot:
        without_zero_shot.delattr(ZeroShot, "item_vectors")
        evaluate(ALL_METRICS, export=export, dataset=dataset, folder=tmp_path / "same")  # without vectors
    for name in vector_files:
        (tmp_path / name).rename(export.folder / name)
    other_cutoffs = ALL_METRICS.model_copy(update={"ks": (5, 60)})
    with caplog.at_level("INFO"):
        metrics = evaluate(other_cutoffs, export=export, dataset=dataset, folder=tmp_path / "other").metrics
    assert "the settings of the evaluation have changed since the export" in caplog.text
    export_without_rankings = export.model_copy(update={"ranking": None})
    expected = evaluate(other_cutoffs, export=export_without_rankings, dataset=dataset, folder=tmp_path / "expected").metrics
    assert metrics == expected


def test_query_vectors_end_in_the_trained_weight_and_item_vectors_in_the_popularity(
    dataset: Dataset, trained_model: tuple[Experiment, FinishedTraining], tmp_path: Path
) -> None:
    export = write_export(*trained_model, tmp_path / "export")
    item_vector_ID, query_BD = (np.load(export.path(name)) for name in ("item_vectors.npy", "query_vectors_test.npy"))
    popularity_I = item_popularity(EventStore.open(dataset.interactions).train_count_I)
    assert np.array_equal(item_vector_ID[:, -1], popularity_I) and export.dim == item_vector_ID.shape[1]
    weight = load_file(export.path("dense.safetensors"))["query.popularity.weight"].item()
    assert abs(weight) > 1e-4 and np.array_equal(np.unique(query_BD[:, -1]), [np.float32(weight)])
