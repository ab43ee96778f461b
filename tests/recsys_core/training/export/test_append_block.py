"""The spectral block of an export, compared with scores by definition and with the served query tower."""

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
from tests.recsys_core.evaluation.stage_folders import interactions_stage
from tests.recsys_core.training.export.validation_metric import mean_ndcg

NUM_USERS, NUM_ITEMS, DIM, BLOCK_DIM, BLOCK_LENGTH = 60, 40, 8, 6, 12
VALIDATION = ValidationConfig(metric="ndcg", k=5)
SPLITS = ("validation", "test")


class Exported(NamedTuple):
    """An export without a block, and its data. Query vectors are computed by a random tower."""

    folder: Path
    store: EventStore
    trained: dict[str, np.ndarray]
    items: np.ndarray
    dense: dict[str, torch.Tensor]

    def spec(self, history_length: int = 4, **block: Any) -> ModelSpec:
        settings = {"dim": BLOCK_DIM, "history_length": BLOCK_LENGTH, **block}
        return spec_of(history_length, {"spectral_block": settings})

    def scores(self, split: str) -> np.ndarray:
        query, item = (np.load(self.folder / f"{name}.npy") for name in (f"query_vectors_{split}", "item_vectors"))
        result: np.ndarray = query @ item.T
        return result

    def expected(self, split: str, weight: float) -> np.ndarray:
        """Return the trained scores plus the scores of the block, whose deviation is `weight` times that of the trained."""
        matrix_UI = log_matrix(self.store, before="validation", max_events=10_000)
        history_factor_IM, candidate_factor_IM = block_factors(matrix_UI, dim=BLOCK_DIM, item_exponent=0.4)
        history = self.store.items_before(np.arange(NUM_USERS), split, max_items=BLOCK_LENGTH)  # type: ignore[arg-type]
        items_by_user = [history.slice(user, user + 1).values_L for user in range(NUM_USERS)]
        total_BM = np.array([history_factor_IM[items].sum(axis=0) for items in items_by_user])
        block_BI = total_BM / np.linalg.norm(total_BM, axis=1, keepdims=True) @ candidate_factor_IM.T
        trained = [self.trained[name] @ self.items.T for name in SPLITS]
        unit = np.sqrt(np.concatenate(trained).var(axis=1, ddof=1).mean())
        result: np.ndarray = self.trained[split] @ self.items.T + weight * unit * block_BI
        return result


def spec_of(history_length: int, model: dict[str, Any]) -> ModelSpec:
    history = {"length": history_length, "last_item_feature": False}
    config = {"embedding_dim": DIM, "history": history, "learn_user_embedding": True, **model}
    return ModelSpec.sized(TwoTowerConfig.model_validate(config), num_users=NUM_USERS, num_items=NUM_ITEMS)


@pytest.fixture(params=[0, 4], ids=["no trained history", "trained history"])
def exported(request: pytest.FixtureRequest, tmp_path: Path) -> Exported:
    random, folder = np.random.default_rng(2), tmp_path / "export"
    folder.mkdir()
    popular = random.dirichlet(np.full(NUM_ITEMS, 0.5))
    events = [random.choice(NUM_ITEMS, 16, replace=False, p=popular * 0.9 + 0.1 / NUM_ITEMS).tolist() for _ in range(NUM_USERS)]
    manifest = interactions_stage(
        tmp_path / "interactions",
        train=[rows[:10] for rows in events],
        validation=[rows[10:13] for rows in events],
        test=[rows[13:] for rows in events],
        num_items=NUM_ITEMS,
    )
    store, spec = EventStore.open(manifest), spec_of(request.param, {})
    torch.manual_seed(0)
    tower = make_query_tower(spec).eval()
    items = torch.nn.functional.normalize(torch.randn(NUM_ITEMS, DIM), dim=1)
    np.save(folder / "history_items.npy", torch.randn(NUM_ITEMS, DIM).numpy())
    np.save(folder / "table_user.npy", torch.randn(NUM_USERS, DIM).numpy())
    np.save(folder / "item_vectors.npy", items.numpy())
    dense = {f"query.{name}": tensor for name, tensor in tower.state_dict().items()}
    served = tower_of(folder, spec, dense)
    trained = {}
    for split in SPLITS:
        trained[split] = served(
            np.arange(NUM_USERS), store.items_before(np.arange(NUM_USERS), split), features=FeatureStore({})
        )  # type: ignore[arg-type]
        np.save(folder / f"query_users_{split}.npy", np.arange(NUM_USERS))
        np.save(folder / f"query_vectors_{split}.npy", trained[split].numpy())
    return Exported(folder, store, {name: query.numpy() for name, query in trained.items()}, items.numpy(), dense)


def tower_of(folder: Path, spec: ModelSpec, dense: dict[str, torch.Tensor]) -> ServedQueryTower:
    block = None
    if spec.config.spectral_block is not None:
        maps = load_file(folder / BLOCK_MAPS_FILE)
        block = BlockArrays(np.load(folder / BLOCK_HISTORY_FILE), maps["query_map"], maps["similar_map"])
    return build_tower(
        spec,
        history_items=np.load(folder / "history_items.npy"),
        tables={"user": np.load(folder / "table_user.npy")},
        dense=dense,
        quantization="fp32",
        block=block,
    )


def history_length_of(exported: Exported) -> int:
    return 4 if "query.pooling.start" in exported.dense else 0


@pytest.mark.parametrize("output_dim", [None, 12], ids=["concatenated", "reduced"])
def test_scores_are_the_sum_of_the_trained_ones_and_of_those_of_the_block(exported: Exported, output_dim: int | None) -> None:
    expected = {split: exported.expected(split, 0.3) for split in SPLITS}
    spec = exported.spec(history_length_of(exported), weights=(0.3,), output_dim=output_dim)
    assert append_block(spec, store=exported.store, validation=None, folder=exported.folder) == 0.3
    assert np.load(exported.folder / "item_vectors.npy").shape == (NUM_ITEMS, output_dim or DIM + BLOCK_DIM)
    for split in SPLITS:
        error = exported.scores(split) - expected[split]
        assert np.abs(error).max() < 1e-4 if output_dim is None else error.std() < 0.1 * expected[split].std()


def test_the_size_of_the_chunks_does_not_change_the_vectors(exported: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = exported.expected("test", 0.3)
    for module in (append_block_module, spectral_block):
        monkeypatch.setattr(module, "CHUNK_ROWS", 7)
    spec = exported.spec(history_length_of(exported), weights=(0.3,))
    append_block(spec, store=exported.store, validation=None, folder=exported.folder)
    np.testing.assert_allclose(exported.scores("test"), expected, atol=1e-4)
    assert not list(exported.folder.glob("*.new"))


def test_a_reduction_to_the_full_width_changes_no_score(exported: Exported) -> None:
    expected = exported.expected("test", 0.3)
    spec = exported.spec(history_length_of(exported), dim=8, weights=(0.3,), output_dim=16)
    with_eight = exported.spec(history_length_of(exported), dim=8, weights=(0.3,))
    folder = exported.folder.with_name("copy")
    folder.mkdir()
    for path in exported.folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    append_block(spec, store=exported.store, validation=None, folder=exported.folder)
    append_block(with_eight, store=exported.store, validation=None, folder=folder)
    other = exported._replace(folder=folder)
    np.testing.assert_allclose(exported.scores("test"), other.scores("test"), atol=1e-3)
    assert not np.allclose(other.scores("test"), expected, atol=1e-3)  # six singular vectors are not eight


def test_the_weight_with_the_best_validation_metric_is_chosen(exported: Exported) -> None:
    weights = (0.0, 0.5, 2.0)
    metric_by_weight = {
        weight: mean_ndcg(exported.expected("validation", weight), store=exported.store, k=5) for weight in weights
    }
    best = max(metric_by_weight, key=lambda weight: metric_by_weight[weight])
    spec = exported.spec(history_length_of(exported), weights=weights)
    assert append_block(spec, store=exported.store, validation=VALIDATION, folder=exported.folder) == best
    assert len({*metric_by_weight.values()}) == len(weights)


@pytest.mark.parametrize("output_dim", [None, 12], ids=["concatenated", "reduced"])
def test_the_served_tower_and_its_padded_form_give_the_exported_queries(exported: Exported, output_dim: int | None) -> None:
    spec = exported.spec(history_length_of(exported), weights=(0.4,), output_dim=output_dim)
    append_block(spec, store=exported.store, validation=None, folder=exported.folder)
    tower, users = tower_of(exported.folder, spec, exported.dense), np.arange(NUM_USERS)
    history = exported.store.items_before(users, "test")
    expected = np.load(exported.folder / "query_vectors_test.npy")
    np.testing.assert_allclose(tower(users, history, features=FeatureStore({})).numpy(), expected, atol=1e-5)
    inputs = padded_inputs(tower, users, history, features=FeatureStore({}))
    padded = PaddedQueryTower(tower)({name: torch.from_numpy(values) for name, values in inputs.items()})
    np.testing.assert_allclose(padded.detach().numpy(), expected, atol=1e-5)


def test_the_block_of_a_refit_contains_the_held_out_events(exported: Exported, tmp_path: Path) -> None:
    interactions = load_manifest(tmp_path / "interactions", InteractionsManifest)
    assert interactions is not None
    merged = EventStore.open(merge_splits(interactions, tmp_path / "merged"))
    spec = exported.spec(history_length_of(exported), weights=(0.3,))
    append_block(spec, store=exported.store, validation=None, folder=exported.folder, train_log=merged)
    all_UI = log_matrix(exported.store, before="validation", max_events=10_000)
    merged_UI = log_matrix(merged, before="validation", max_events=10_000)
    assert (all_UI.sum(), merged_UI.sum()) == (NUM_USERS * 10, NUM_USERS * 16)
    history_factor_IM, candidate_factor_IM = block_factors(merged_UI, dim=BLOCK_DIM, item_exponent=0.4)
    assert np.array_equal(np.load(exported.folder / BLOCK_HISTORY_FILE), history_factor_IM)
    assert np.array_equal(np.load(exported.folder / "item_vectors.npy")[:, DIM:], candidate_factor_IM)


def test_several_weights_need_validation_events(exported: Exported) -> None:
    with pytest.raises(InputError, match=r"spectral_block.weights has 4 values, but there are no validation events"):
        append_block(exported.spec(), store=exported.store, validation=None, folder=exported.folder)


def test_a_model_with_a_block_knows_every_user_with_a_history() -> None:
    spec = spec_of(0, {"spectral_block": {"dim": BLOCK_DIM}})
    lengths, rows = np.array([0, 3, 0, 3]), np.array([-1, -1, 2, 2])
    assert spec.is_known(history_length_B=lengths, user_row_B=rows).tolist() == [False, True, True, True]


def test_a_refit_keeps_the_choices_of_its_run() -> None:
    spec = spec_of(0, {"spectral_block": {"dim": BLOCK_DIM}, "temperature": "auto"})
    chosen = spec.with_choices(temperature=0.15, block_weight=0.5).config
    assert chosen.temperature == 0.15 and chosen.spectral_block.weights == (0.5,)  # type: ignore[union-attr]
    assert spec.with_choices(temperature=None, block_weight=None) is spec


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"popularity": {"kind": "learned"}, "spectral_block": {}}, "a model has only one of them"),
        ({"spectral_block": {"dim": 8, "output_dim": 20}}, "the concatenated vectors have only 8 \\+ 8 numbers"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(model: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spec_of(4, model)
