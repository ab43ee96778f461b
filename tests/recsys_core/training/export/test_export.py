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
    evaluation_by_num_shards, files_by_num_shards = {}, {}
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
        evaluation_by_num_shards[num_shards] = evaluate(
            ALL_METRICS, export=export, dataset=dataset, folder=folder / "evaluation"
        )
        files_by_num_shards[num_shards] = {name: record for name, record in export.files.items() if name != "model.json"}
        assert dataset.interactions.num_shards == num_shards
    assert files_by_num_shards[1] == files_by_num_shards[8]  # checksums of vectors, tables, layers and rankings
    one_shard_evaluation, eight_shard_evaluation = evaluation_by_num_shards[1], evaluation_by_num_shards[8]
    for field in ("metrics", "slices", "half_widths"):
        assert getattr(one_shard_evaluation, field) == getattr(eight_shard_evaluation, field)
    assert one_shard_evaluation.metrics["test/users"] > 50
    export_without_rankings = export.model_copy(update={"ranking": None})
    single_process_evaluation = evaluate(
        ALL_METRICS, export=export_without_rankings, dataset=dataset, folder=folder / "one process"
    )
    assert single_process_evaluation.metrics == eight_shard_evaluation.metrics
    for name in ("positions.parquet", "user_metrics.parquet", "popularity.npy"):
        assert one_shard_evaluation.path(name).read_bytes() == eight_shard_evaluation.path(name).read_bytes()
        assert single_process_evaluation.path(name).read_bytes() == eight_shard_evaluation.path(name).read_bytes()


@pytest.mark.parametrize("config", [ALL_METRICS, TOP_LISTS], ids=["all metrics", "top lists"])
def test_the_evaluation_of_stored_rankings_equals_the_evaluation_of_vectors(
    config: EvaluationConfig, dataset: Dataset, trained_model: tuple[Experiment, FinishedTraining], tmp_path: Path
) -> None:
    export = write_export(*trained_model, tmp_path / "export", ranking=ranking_settings(config))
    export_without_rankings = export.model_copy(update={"ranking": None})
    ranking_evaluation = evaluate(config, export=export, dataset=dataset, folder=tmp_path / "stored")
    vector_evaluation = evaluate(config, export=export_without_rankings, dataset=dataset, folder=tmp_path / "computed")
    assert ranking_evaluation.metrics == vector_evaluation.metrics and ranking_evaluation.slices == vector_evaluation.slices
    assert {
        "test/users",
        "validation/users",
        f"baseline/zero_shot/recall@{config.ks[0]}",
    } <= ranking_evaluation.metrics.keys()
    # The 40 users that TOP_LISTS samples have no cold target.
    assert config is TOP_LISTS or "test/cold/users" in ranking_evaluation.metrics
    for name in ("positions.parquet", "user_metrics.parquet", "metrics.json"):
        assert ranking_evaluation.path(name).read_bytes() == vector_evaluation.path(name).read_bytes()


def test_stored_rankings_are_used_only_if_they_have_the_settings_of_the_evaluation(
    dataset: Dataset,
    trained_model: tuple[Experiment, FinishedTraining],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    export = write_export(*trained_model, tmp_path / "export", ranking=ranking_settings(ALL_METRICS))
    vector_file_names = ("item_vectors.npy", "query_vectors_test.npy", "query_vectors_validation.npy")
    for name in vector_file_names:
        (export.folder / name).rename(tmp_path / name)
    with monkeypatch.context() as patch:
        patch.delattr(ZeroShot, "item_vectors")
        evaluate(ALL_METRICS, export=export, dataset=dataset, folder=tmp_path / "same")  # no vectors are read
    for name in vector_file_names:
        (tmp_path / name).rename(export.folder / name)
    other_cutoffs_config = ALL_METRICS.model_copy(update={"ks": (5, 60)})
    with caplog.at_level("INFO"):
        metrics = evaluate(other_cutoffs_config, export=export, dataset=dataset, folder=tmp_path / "other").metrics
    assert "the settings of the evaluation have changed since the export" in caplog.text
    export_without_rankings = export.model_copy(update={"ranking": None})
    expected_metrics = evaluate(
        other_cutoffs_config, export=export_without_rankings, dataset=dataset, folder=tmp_path / "expected"
    ).metrics
    assert metrics == expected_metrics


def test_query_vectors_end_in_the_trained_weight_and_item_vectors_in_the_popularity(
    dataset: Dataset, trained_model: tuple[Experiment, FinishedTraining], tmp_path: Path
) -> None:
    export = write_export(*trained_model, tmp_path / "export")
    item_vector_ID, query_BD = (np.load(export.path(name)) for name in ("item_vectors.npy", "query_vectors_test.npy"))
    popularity_I = item_popularity(EventStore.open(dataset.interactions).train_count_I)
    assert np.array_equal(item_vector_ID[:, -1], popularity_I) and export.dim == item_vector_ID.shape[1]
    weight = load_file(export.path("dense.safetensors"))["query.popularity.weight"].item()
    assert abs(weight) > 1e-4 and np.array_equal(np.unique(query_BD[:, -1]), [np.float32(weight)])
