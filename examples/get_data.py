"""Download public datasets from their owners, verify their sha256, and convert them to parquet.

    python examples/get_data.py beauty        # Amazon Beauty as preprocessed by S3-Rec
    python examples/get_data.py movielens     # MovieLens 1M

The files go to data/<name> in the repository. nightjar does not redistribute the data. The terms of use of their owners apply.
"""

import argparse
import hashlib
import io
import json
import sys
import urllib.request
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

DATA = Path(__file__).resolve().parents[1] / "data"
S3_REC = "https://raw.githubusercontent.com/aHuiWang/CIKM2020-S3Rec"
DATA_COMMIT, MODEL_COMMIT = "e6c774da92dba847b00ac89e8bfc5c55cc44d378", "9b68bca51ba89cf6d9f28a4f86496cdd69723ded"
MOVIELENS = "https://files.grouplens.org/datasets/movielens/ml-1m.zip"
TIMEOUT_S = 60

# The checksums of Beauty are those of the parsed content, so they do not depend on the format of the files.
SHA256 = {
    "Beauty.txt": "05a48f107c999605161ef941ad3bd770e453201af1e3be13672914a4a0f9c995",
    "Beauty_item2attributes.json": "afe431d96943b2496b6d4d250e477ff747a24b582beed978857f0f4d2755d0c6",
    "Beauty-epochs-150.pt": "7b18056d2715a45c69df51a4c15c0ba30678eba18af80c3fc21d6121dd6df266",
    "ml-1m.zip": "a6898adb50b9ca05aa231689da44c217cb524e7ebd39d264c56e2832f2c54e20",
}


def main() -> None:
    """Download one dataset."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", choices=["beauty", "movielens"])
    parser.add_argument("--folder", type=Path, help="target folder (default: data/<dataset>)")
    arguments = parser.parse_args()
    folder = arguments.folder or DATA / arguments.dataset
    tables = beauty_tables() if arguments.dataset == "beauty" else movielens_tables()
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        pq.write_table(table, folder / f"{name}.parquet", write_page_checksum=True)
        sys.stdout.write(f"{folder / name}.parquet: {table.num_rows:,} rows\n")


def beauty_tables() -> dict[str, pa.Table]:
    """Return the tables of events, item attributes, and item vectors pretrained by S3-Rec."""
    events = beauty_events(download(f"{S3_REC}/{DATA_COMMIT}/data/Beauty.txt"))
    attributes = beauty_attributes(download(f"{S3_REC}/{DATA_COMMIT}/data/Beauty_item2attributes.json"))
    num_items = int(events[:, 1].max())
    vectors = beauty_vectors(download(f"{S3_REC}/{MODEL_COMMIT}/reproduce/Beauty-epochs-150.pt"), num_items=num_items)
    item_ids = np.arange(1, num_items + 1)
    dim = vectors.shape[1]
    return {
        "interactions": pa.table({"user_id": events[:, 0], "item_id": events[:, 1], "position": events[:, 2].astype(np.int32)}),
        "items": pa.table(
            {
                "item_id": item_ids,
                "attributes": pa.array([attributes.get(str(item), []) for item in item_ids], pa.list_(pa.int32())),
            }
        ),
        "item_embeddings": pa.table(
            {"item_id": item_ids, "embedding": pa.FixedSizeListArray.from_arrays(vectors.ravel(), dim)}
        ),
    }


def beauty_events(content: bytes) -> NDArray[np.int64]:
    """Return [events, 3]: user id, item id and position of the event in the user's history, starting at 0.

    >>> SHA256["Beauty.txt"] = hashlib.sha256(np.array([[1, 7, 0], [1, 9, 1]]).tobytes()).hexdigest()
    >>> beauty_events(b"1 7 9\\n").tolist()
    [[1, 7, 0], [1, 9, 1]]
    """
    histories = sorted([int(number) for number in line.split()] for line in content.decode().splitlines() if line.strip())
    events = np.array([(user, item, index) for user, *items in histories for index, item in enumerate(items)], np.int64)
    verify("Beauty.txt", events.tobytes())
    return events


def beauty_attributes(content: bytes) -> dict[str, list[int]]:
    """Return the attribute ids of each item id."""
    attributes: dict[str, list[int]] = json.loads(content)
    sorted_attributes = sorted((int(item), values) for item, values in attributes.items())
    verify("Beauty_item2attributes.json", json.dumps(sorted_attributes).encode())
    return attributes


def beauty_vectors(content: bytes, *, num_items: int) -> NDArray[np.float32]:
    """Return [items, 64]: the item embeddings of S3-Rec's checkpoint, without its padding and mask rows."""
    state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    vectors = np.ascontiguousarray(state["item_embeddings.weight"][1 : num_items + 1].numpy(), np.float32)
    verify("Beauty-epochs-150.pt", vectors.tobytes())
    return vectors


def movielens_tables() -> dict[str, pa.Table]:
    """Return ratings, movies, and the user-item pairs of the ratings. A random fifth of the pairs is the test split."""
    content = download(MOVIELENS)
    verify("ml-1m.zip", content)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        ratings = np.array([line.split("::") for line in read_lines(archive, "ml-1m/ratings.dat")], np.int64)
        movies = [line.split("::") for line in read_lines(archive, "ml-1m/movies.dat")]
    columns = {"user_id": ratings[:, 0], "item_id": ratings[:, 1], "rating": ratings[:, 2]}
    log = pa.table({**columns, "timestamp": pa.array(ratings[:, 3], pa.timestamp("s"))})
    is_test = np.random.default_rng(7).random(len(ratings)) < 0.2
    pairs = log.select(["user_id", "item_id"])
    return {
        "ratings": log,
        "movies": pa.table(
            {
                "item_id": [int(movie) for movie, _, _ in movies],
                "title": [title for _, title, _ in movies],
                "genres": [genres.split("|") for _, _, genres in movies],
            }
        ),
        "train": pairs.filter(pa.array(~is_test)),
        "test": pairs.filter(pa.array(is_test)),
    }


def read_lines(archive: zipfile.ZipFile, name: str) -> list[str]:
    """Return the lines of a Latin-1 file of the archive."""
    return archive.read(name).decode("latin-1").splitlines()


def download(url: str) -> bytes:
    """Return the content at an https URL."""
    sys.stderr.write(f"downloading {url}\n")
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:  # noqa: S310 the URLs are constants of this file
        content: bytes = response.read()
    return content


def verify(name: str, content: bytes) -> None:
    """Exit if the sha256 of `content` is not the one that SHA256 has for `name`."""
    sha256 = hashlib.sha256(content).hexdigest()
    if sha256 != SHA256[name]:
        sys.exit(f"{name}: sha256 is {sha256}, expected {SHA256[name]}; the source has changed, so nothing was written")


if __name__ == "__main__":
    main()
