"""The spectral block of an export, compared with its definition and with the served query tower."""

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from recsys_core.closed_form import spectral_block
from recsys_core.closed_form.linear_models import log_matrix
from recsys_core.closed_form.spectral_block import block_factors
from recsys_core.dataset.events import EventStore
from recsys_core.dataset.feature_store import FeatureStore
from recsys_core.errors import InputError
from recsys_core.ingest.log.merged_splits import merge_splits
from recsys_core.manifests import InteractionsManifest, load_manifest
from recsys_core.models.config import TwoTowerConfig
from recsys_core.models.ensemble import make_query_tower
from recsys_core.models.score_terms import BLOCK_HISTORY_FILE, BLOCK_MAPS_FILE
from recsys_core.models.spec import ModelSpec
from recsys_core.serving.exports.padded_tower import PaddedQueryTower, padded_inputs
from recsys_core.serving.quantise import BlockArrays, ServedQueryTower, build_tower
from recsys_core.training.config import ValidationConfig
from recsys_core.training.export import append_block as append_block_module
from recsys_core.training.export.append_block import append_block
from tests.recsys_core.evaluation.stage_folders import write_interactions_stage
from tests.recsys_core.training.export.validation_metric import mean_ndcg

NUM_USERS, NUM_ITEMS, DIM, BLOCK_DIM, BLOCK_LENGTH = 60, 40, 8, 6, 12
ITEM_EXPONENT = 0.4
"""Default of `spectral_block.item_exponent`."""
VALIDATION = ValidationConfig(metric="ndcg", k=5)
SPLITS = ("validation", "test")


class TrainedExport(NamedTuple):
    """An export to which the tests append a block.

    Attributes:
        store: the events of the export's run.
        history_length: items in a history of the trained tower; 0: it has no history.
        query_by_split: trained query vectors [U, D].
        item_vector_ID: trained item vectors.
        layer_by_name: layers of the trained tower, which has random weights.
    """

    folder: Path
    store: EventStore
    history_length: int
    query_by_split: dict[str, np.ndarray]
    item_vector_ID: np.ndarray
    layer_by_name: dict[str, torch.Tensor]

    def spec(self, **block_settings: Any) -> ModelSpec:
        """Return the spec of the model with a block."""
        settings = {"dim": BLOCK_DIM, "history_length": BLOCK_LENGTH, **block_settings}
        return spec_of(self.history_length, {"spectral_block": settings})

    def scores(self, split: str) -> np.ndarray:
        """Return the scores [U, I] of the vectors that are in the folder now."""
        query_UD, item_vector_ID = (np.load(self.folder / f"{name}.npy") for name in (f"query_vectors_{split}", "item_vectors"))
        score_UI: np.ndarray = query_UD @ item_vector_ID.T
        return score_UI

    def trained_scores(self, split: str) -> np.ndarray:
        score_UI: np.ndarray = self.query_by_split[split] @ self.item_vector_ID.T
        return score_UI

    def expected_scores(self, split: str, weight: float) -> np.ndarray:
        """Return trained scores + `weight` * standard deviation of trained scores * scores of the block."""
        matrix_UI = log_matrix(self.store, before="validation", max_events=10_000)
        history_factor_IM, candidate_factor_IM = block_factors(matrix_UI, dim=BLOCK_DIM, item_exponent=ITEM_EXPONENT)
        history = self.store.items_before(np.arange(NUM_USERS), split, max_items=BLOCK_LENGTH)  # type: ignore[arg-type]
        items_by_user = [history.slice(user, user + 1).values_L for user in range(NUM_USERS)]
        total_UM = np.array([history_factor_IM[items].sum(axis=0) for items in items_by_user])
        block_score_UI = total_UM / np.linalg.norm(total_UM, axis=1, keepdims=True) @ candidate_factor_IM.T
        trained_scores = np.concatenate([self.trained_scores(name) for name in SPLITS])
        trained_std = np.sqrt(trained_scores.var(axis=1, ddof=1).mean())
        score_UI: np.ndarray = self.trained_scores(split) + weight * trained_std * block_score_UI
        return score_UI


def spec_of(history_length: int, model_settings: dict[str, Any]) -> ModelSpec:
    history = {"length": history_length, "last_item_feature": False}
    config = {"embedding_dim": DIM, "history": history, "learn_user_embedding": True, **model_settings}
    return ModelSpec.sized(TwoTowerConfig.model_validate(config), num_users=NUM_USERS, num_items=NUM_ITEMS)


@pytest.fixture(params=[0, 4], ids=["no trained history", "trained history"])
def export(request: pytest.FixtureRequest, tmp_path: Path) -> TrainedExport:
    """An export of random items, users and layers; `request.param` is the history length of its tower."""
    random, folder = np.random.default_rng(2), tmp_path / "export"
    folder.mkdir()
    probability_I = random.dirichlet(np.full(NUM_ITEMS, 0.5)) * 0.9 + 0.1 / NUM_ITEMS
    items_by_user = [random.choice(NUM_ITEMS, 16, replace=False, p=probability_I).tolist() for _ in range(NUM_USERS)]
    interactions = write_interactions_stage(
        tmp_path / "interactions",
        train=[items[:10] for items in items_by_user],
        validation=[items[10:13] for items in items_by_user],
        test=[items[13:] for items in items_by_user],
        num_items=NUM_ITEMS,
    )
    store, spec = EventStore.open(interactions), spec_of(request.param, {})
    torch.manual_seed(0)
    tower = make_query_tower(spec).eval()
    item_vector_ID = torch.nn.functional.normalize(torch.randn(NUM_ITEMS, DIM), dim=1)
    np.save(folder / "history_items.npy", torch.randn(NUM_ITEMS, DIM).numpy())
    np.save(folder / "table_user.npy", torch.randn(NUM_USERS, DIM).numpy())
    np.save(folder / "item_vectors.npy", item_vector_ID.numpy())
    layer_by_name = {f"query.{name}": tensor for name, tensor in tower.state_dict().items()}
    served_tower, users = tower_of(folder, spec, layer_by_name), np.arange(NUM_USERS)
    query_by_split = {}
    for split in SPLITS:
        history = store.items_before(users, split)  # type: ignore[arg-type]
        query_by_split[split] = served_tower(users, history, features=FeatureStore({})).numpy()
        np.save(folder / f"query_users_{split}.npy", users)
        np.save(folder / f"query_vectors_{split}.npy", query_by_split[split])
    return TrainedExport(folder, store, request.param, query_by_split, item_vector_ID.numpy(), layer_by_name)


def tower_of(folder: Path, spec: ModelSpec, layer_by_name: dict[str, torch.Tensor]) -> ServedQueryTower:
    """Return the served query tower, with the tables and the block of the export in `folder`."""
    block = None
    if spec.config.spectral_block is not None:
        map_by_name = load_file(folder / BLOCK_MAPS_FILE)
        block = BlockArrays(np.load(folder / BLOCK_HISTORY_FILE), map_by_name["query_map"], map_by_name["similar_map"])
    return build_tower(
        spec,
        history_items=np.load(folder / "history_items.npy"),
        tables={"user": np.load(folder / "table_user.npy")},
        dense=layer_by_name,
        quantization="fp32",
        block=block,
    )


@pytest.mark.parametrize("output_dim", [None, 12], ids=["concatenated", "reduced"])
def test_scores_are_the_trained_scores_plus_the_scores_of_the_block(export: TrainedExport, output_dim: int | None) -> None:
    expected_score_by_split = {split: export.expected_scores(split, 0.3) for split in SPLITS}
    spec = export.spec(weights=(0.3,), output_dim=output_dim)
    assert append_block(spec, store=export.store, validation=None, folder=export.folder) == 0.3
    assert np.load(export.folder / "item_vectors.npy").shape == (NUM_ITEMS, output_dim or DIM + BLOCK_DIM)
    for split in SPLITS:
        error_UI = export.scores(split) - expected_score_by_split[split]
        if output_dim is None:
            assert np.abs(error_UI).max() < 1e-4
        else:
            assert error_UI.std() < 0.1 * expected_score_by_split[split].std()


def test_the_number_of_rows_in_a_chunk_does_not_change_the_scores(
    export: TrainedExport, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected_score_UI = export.expected_scores("test", 0.3)
    for module in (append_block_module, spectral_block):
        monkeypatch.setattr(module, "CHUNK_ROWS", 7)
    spec = export.spec(weights=(0.3,))
    append_block(spec, store=export.store, validation=None, folder=export.folder)
    np.testing.assert_allclose(export.scores("test"), expected_score_UI, atol=1e-4)
    assert not list(export.folder.glob("*.new"))


def test_a_reduction_to_the_full_width_changes_no_score(export: TrainedExport) -> None:
    scores_with_smaller_block = export.expected_scores("test", 0.3)
    spec = export.spec(dim=8, weights=(0.3,), output_dim=16)
    spec_without_reduction = export.spec(dim=8, weights=(0.3,))
    copied_export = export._replace(folder=export.folder.with_name("copy"))
    shutil.copytree(export.folder, copied_export.folder)
    append_block(spec, store=export.store, validation=None, folder=export.folder)
    append_block(spec_without_reduction, store=export.store, validation=None, folder=copied_export.folder)
    np.testing.assert_allclose(export.scores("test"), copied_export.scores("test"), atol=1e-3)
    assert not np.allclose(copied_export.scores("test"), scores_with_smaller_block, atol=1e-3)


def test_the_weight_with_the_best_validation_metric_is_chosen(export: TrainedExport) -> None:
    weights = (0.0, 0.5, 2.0)
    metric_by_weight = {
        weight: mean_ndcg(export.expected_scores("validation", weight), store=export.store, k=5) for weight in weights
    }
    best_weight = max(metric_by_weight, key=lambda weight: metric_by_weight[weight])
    spec = export.spec(weights=weights)
    assert append_block(spec, store=export.store, validation=VALIDATION, folder=export.folder) == best_weight
    assert len({*metric_by_weight.values()}) == len(weights)


@pytest.mark.parametrize("output_dim", [None, 12], ids=["concatenated", "reduced"])
def test_the_served_tower_and_its_padded_form_compute_the_exported_queries(
    export: TrainedExport, output_dim: int | None
) -> None:
    spec = export.spec(weights=(0.4,), output_dim=output_dim)
    append_block(spec, store=export.store, validation=None, folder=export.folder)
    tower, user_U = tower_of(export.folder, spec, export.layer_by_name), np.arange(NUM_USERS)
    history = export.store.items_before(user_U, "test")
    expected_query_UD = np.load(export.folder / "query_vectors_test.npy")
    np.testing.assert_allclose(tower(user_U, history, features=FeatureStore({})).numpy(), expected_query_UD, atol=1e-5)
    inputs = padded_inputs(tower, user_U, history, features=FeatureStore({}))
    query_BD = PaddedQueryTower(tower)({name: torch.from_numpy(values) for name, values in inputs.items()})
    np.testing.assert_allclose(query_BD.detach().numpy(), expected_query_UD, atol=1e-5)


def test_the_block_of_a_refit_contains_the_held_out_events(export: TrainedExport, tmp_path: Path) -> None:
    interactions = load_manifest(tmp_path / "interactions", InteractionsManifest)
    assert interactions is not None
    merged_store = EventStore.open(merge_splits(interactions, tmp_path / "merged"))
    spec = export.spec(weights=(0.3,))
    append_block(spec, store=export.store, validation=None, folder=export.folder, train_store=merged_store)
    train_matrix_UI = log_matrix(export.store, before="validation", max_events=10_000)
    merged_matrix_UI = log_matrix(merged_store, before="validation", max_events=10_000)
    # A user has 16 events, 10 of them in the training split.
    assert (train_matrix_UI.sum(), merged_matrix_UI.sum()) == (NUM_USERS * 10, NUM_USERS * 16)
    history_factor_IM, candidate_factor_IM = block_factors(merged_matrix_UI, dim=BLOCK_DIM, item_exponent=ITEM_EXPONENT)
    assert np.array_equal(np.load(export.folder / BLOCK_HISTORY_FILE), history_factor_IM)
    assert np.array_equal(np.load(export.folder / "item_vectors.npy")[:, DIM:], candidate_factor_IM)


def test_several_weights_need_validation_events(export: TrainedExport) -> None:
    with pytest.raises(InputError, match=r"spectral_block.weights has 4 values, but there are no validation events"):
        append_block(export.spec(), store=export.store, validation=None, folder=export.folder)


def test_users_with_a_history_or_a_row_are_known_to_a_model_with_a_block() -> None:
    spec = spec_of(0, {"spectral_block": {"dim": BLOCK_DIM}})
    history_length_B, user_row_B = np.array([0, 3, 0, 3]), np.array([-1, -1, 2, 2])
    is_known_B = spec.is_known(history_length_B=history_length_B, user_row_B=user_row_B, has_context=False)
    assert is_known_B.tolist() == [False, True, True, True]


def test_with_choices_sets_the_chosen_temperature_and_weight() -> None:
    spec = spec_of(0, {"spectral_block": {"dim": BLOCK_DIM}, "temperature": "auto"})
    chosen_config = spec.with_choices(temperature=0.15, block_weight=0.5).config
    assert chosen_config.temperature == 0.15 and chosen_config.spectral_block.weights == (0.5,)  # type: ignore[union-attr]
    assert spec.with_choices(temperature=None, block_weight=None) is spec


@pytest.mark.parametrize(
    ("model_settings", "message"),
    [
        ({"popularity": {"kind": "learned"}, "spectral_block": {}}, "a model has only one of them"),
        ({"spectral_block": {"dim": 8, "output_dim": 20}}, "the concatenated vectors have only 8 \\+ 8 numbers"),
    ],
)
def test_contradictory_settings_are_rejected(model_settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spec_of(4, model_settings)


def test_a_model_whose_item_vectors_are_all_equal_gets_finite_vectors(export: TrainedExport) -> None:
    np.save(export.folder / "item_vectors.npy", np.tile(100 * export.item_vector_ID[:1], (NUM_ITEMS, 1)))
    append_block(export.spec(weights=[1.0]), store=export.store, validation=VALIDATION, folder=export.folder)
    assert all(np.isfinite(export.scores(split)).all() for split in SPLITS)
