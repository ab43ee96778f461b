"""Items that neither the log nor the tables of a trained run had are added by `nightjar refresh`: `make drills`."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from flows.settings.config_file import load_config
from recsys_core.manifests import ExportManifest, require_manifest
from recsys_core.models.spec import ModelSpec
from recsys_core.models.towers import CandidateTower
from recsys_core.serving.retriever import Retriever
from tasks.registry.loading import load_version
from tests.drills.test_kill_and_resume import NIGHTJAR, run_pipeline, write_config

pytestmark = pytest.mark.drill
ADDED_IDS, REMOVED_IDS = range(1180, 1200), range(1000, 1010)
"""Items that are added to the catalogue after the training, and items that are removed from it."""


def write_rows(path: Path, table: object, *, without: range) -> None:
    """Write a pyarrow table to `path`, without the rows of the item ids `without`."""
    is_left_out = pc.is_in(table["item_id"], value_set=pc.cast(list(without), table["item_id"].type))  # type: ignore[index]
    pq.write_table(table.filter(pc.invert(is_left_out)), path)  # type: ignore[attr-defined]


def nightjar(*arguments: str) -> str:
    """Run a command; return its stdout with single blanks between words."""
    process = subprocess.run([*NIGHTJAR, *arguments], capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    return " ".join(process.stdout.split())


def trained_vectors(export: ExportManifest, vectors: np.ndarray, *, half_rows: list[int]) -> np.ndarray:
    """Compute the vectors of new items as the trained tower does.

    Args:
        vectors: pretrained vectors, one row per item; they are scaled to the norm that the table is initialized with.
        half_rows: row of each item in the table of feature `half`.
    """
    spec = ModelSpec.model_validate_json(export.path("model.json").read_bytes())
    tower = CandidateTower(spec).eval()
    layers = load_file(export.path("dense.safetensors"))
    tower.load_state_dict({name.removeprefix("item."): value for name, value in layers.items() if name.startswith("item.")})
    norm = spec.tables["item"].settings.init_std * np.sqrt(spec.tables["item"].dim)
    item_RD = vectors * norm / np.linalg.norm(vectors, axis=1, keepdims=True)
    half_RD = np.load(export.path("table_item.half.npy"))[half_rows]
    with torch.no_grad():
        item_VD = tower.embed({"item": torch.from_numpy(item_RD.astype(np.float32))})
        return tower(item_VD, features={"item.half": torch.from_numpy(half_RD)}).numpy()


def vector_by_id(retriever: Retriever) -> dict[int, np.ndarray]:
    """Return the vector of each item id."""
    row_I = np.arange(len(retriever.item_ids))
    return dict(zip(retriever.item_ids.ids(row_I).tolist(), retriever.item_vectors(row_I), strict=True))


def test_added_items_get_the_vectors_of_the_trained_tower_and_the_next_run_registers_a_version(tmp_path: Path) -> None:
    config_path = write_config(tmp_path)
    config_text = config_path.read_text().replace("warm_start: null", "warm_start: {}")
    config_path.write_text(config_text)
    table_path = tmp_path / "data" / "item_embeddings.parquet"
    table = pq.read_table(table_path)
    write_rows(table_path, table, without=ADDED_IDS)
    for path in sorted((tmp_path / "data" / "interactions").glob("*.parquet")):
        write_rows(path, pq.read_table(path), without=ADDED_IDS)
    run_answer = run_pipeline(config_path)
    assert run_answer["model"]["alias"] == "champion", run_answer
    config = load_config(config_path)
    assert "no item has changed" in nightjar("refresh", str(config_path))

    write_rows(table_path, table, without=REMOVED_IDS)
    output = nightjar("refresh", str(config_path))
    assert "20 items added, 10 removed, 0 changed), is champion" in output
    old_retriever, new_retriever = (
        load_version(config.workspace, model_name="nightjar", version=number).retriever for number in ("1", "2")
    )
    old_vector_by_id, new_vector_by_id = vector_by_id(old_retriever), vector_by_id(new_retriever)
    assert {*new_vector_by_id} == {*old_vector_by_id} - {*REMOVED_IDS} | {*ADDED_IDS}
    assert new_retriever.space_id == old_retriever.space_id
    for item_id in {*old_vector_by_id} - {*REMOVED_IDS}:
        assert new_vector_by_id[item_id].tobytes() == old_vector_by_id[item_id].tobytes(), item_id
    export = require_manifest(Path(run_answer["run_dir"]) / "export", ExportManifest)
    row_by_id = {item_id: row for row, item_id in enumerate(table["item_id"].to_pylist())}
    vectors = np.stack([np.array(table["embedding"][row_by_id[item_id]].as_py(), np.float32) for item_id in ADDED_IDS])
    expected = trained_vectors(export, vectors, half_rows=[2] * len(ADDED_IDS))  # the upper half of the item ids
    np.testing.assert_allclose(np.stack([new_vector_by_id[item_id] for item_id in ADDED_IDS]), expected, atol=1e-5)
    user_ids = new_retriever.user_ids.ids(np.arange(len(new_retriever.user_ids))).tolist()
    recommended_ids = {item_id for answer in new_retriever.recommend(user_ids, k=50) for item_id in answer.item_ids}
    assert not recommended_ids & {*REMOVED_IDS} and recommended_ids & {*ADDED_IDS}

    releases = json.loads(nightjar("releases", str(config_path), "--json"))
    assert [(release["version"], release["parent"]) for release in releases] == [("2", "1"), ("1", "")]
    next_run = run_pipeline(config_path)
    assert next_run["model"]["version"] == "3"
    if next_run["model"]["alias"] == "champion":
        assert "version 2 is champion instead of version 3" in nightjar("rollback", str(config_path), "--reason", "drill")
