"""Checks and conversion of the public datasets in examples/get_data.py. Small files replace the downloads."""

import hashlib
import importlib.util
import io
import json
import zipfile
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

SCRIPT_PATH = Path(__file__).resolve().parents[2] / "examples" / "get_data.py"
RATINGS_DAT = "1::10::5::978300760\n1::20::3::978302109\n2::10::4::978301968\n"
MOVIES_DAT = "10::Toy Story (1995)::Animation|Comedy\n20::Misérables, Les (1995)::Drama\n"


@pytest.fixture
def get_data() -> ModuleType:
    """The module examples/get_data.py, which is not in a package."""
    module_spec = importlib.util.spec_from_file_location("get_data", SCRIPT_PATH)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return module


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_movielens_becomes_tables_of_ratings_movies_training_pairs_and_test_pairs(
    get_data: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as zip_file:
        zip_file.writestr("ml-1m/ratings.dat", RATINGS_DAT.encode("latin-1"))
        zip_file.writestr("ml-1m/movies.dat", MOVIES_DAT.encode("latin-1"))
    monkeypatch.setattr(get_data, "download", lambda url: archive.getvalue())
    monkeypatch.setitem(get_data.SHA256, "ml-1m.zip", sha256(archive.getvalue()))
    tables = get_data.movielens_tables()
    assert tables["ratings"]["rating"].to_pylist() == [5, 3, 4]
    assert tables["ratings"]["timestamp"][0].as_py().isoformat() == "2000-12-31T22:12:40"
    assert tables["movies"].to_pylist()[1] == {"item_id": 20, "title": "Misérables, Les (1995)", "genres": ["Drama"]}
    assert tables["train"].num_rows + tables["test"].num_rows == 3


def test_beauty_becomes_tables_of_events_attributes_and_vectors(get_data: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = np.arange(16, dtype=np.float32).reshape(4, 4)  # rows 1 and 2 belong to items 1 and 2
    checkpoint = io.BytesIO()
    torch.save({"item_embeddings.weight": torch.from_numpy(vectors)}, checkpoint)
    content_by_name = {
        "Beauty.txt": b"2 1\n1 1 2\n",
        "Beauty_item2attributes.json": b'{"2": [7], "1": [8, 9]}',
        "Beauty-epochs-150.pt": checkpoint.getvalue(),
    }
    monkeypatch.setattr(get_data, "download", lambda url: content_by_name[url.rpartition("/")[2]])
    expected_events = np.array([[1, 1, 0], [1, 2, 1], [2, 1, 0]])
    monkeypatch.setitem(get_data.SHA256, "Beauty.txt", sha256(expected_events.tobytes()))
    expected_attributes = json.dumps([(1, [8, 9]), (2, [7])]).encode()
    monkeypatch.setitem(get_data.SHA256, "Beauty_item2attributes.json", sha256(expected_attributes))
    monkeypatch.setitem(get_data.SHA256, "Beauty-epochs-150.pt", sha256(vectors[1:3].tobytes()))
    tables = get_data.beauty_tables()
    assert tables["interactions"].to_pydict() == {"user_id": [1, 1, 2], "item_id": [1, 2, 1], "position": [0, 1, 0]}
    assert tables["items"]["attributes"].to_pylist() == [[8, 9], [7]]
    assert tables["item_embeddings"]["embedding"].to_pylist() == vectors[1:3].tolist()


def test_a_downloaded_file_that_has_changed_is_rejected(get_data: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"Beauty\.txt: sha256 is [0-9a-f]{64}, expected [0-9a-f]{64}; the source has changed"):
        get_data.beauty_events(b"1 1 2\n")
