"""Benchmark of the size of a package and its files, and of its recall, with several precisions.

    nightjar run examples/beauty.yaml --set workspace=beauty        # data of examples/get_data.py
    python -m benchmarks.package_size beauty/runs/RUN_ID            # 2 minutes; writes package_size.json and package_size.md

The packages are built from the stages of one run. For the recall, each package gets the histories of all test users before
their test events.

Shapes: U test users.
"""

import argparse
import json
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from recsys_core.dataset.events import EventStore
from recsys_core.manifests import (
    Dataset,
    EvaluationManifest,
    ExportManifest,
    FeaturesManifest,
    InteractionsManifest,
    PackageManifest,
    require_manifest,
)
from recsys_core.models.config import PackageConfig
from recsys_core.retrieval.config import IndexConfig
from recsys_core.retrieval.index import build_indexes
from recsys_core.serving.package import build_package
from recsys_core.serving.retriever import Retriever

K = 10
FOLDER = Path(__file__).parent
USER_FILES = ("users.arrow", "users.sha256")


class Precision(NamedTuple):
    """Precision of the query tower, kind of the index, and precision of the vectors in items.parquet."""

    quantization: str
    index_kind: str
    item_vectors: str


PRECISIONS = (
    Precision("fp32", "flat", "fp32"),
    Precision("fp32", "hnsw", "fp32"),
    Precision("int8", "hnsw", "fp32"),
    Precision("int8", "flat", "none"),
    Precision("int8", "ivf_sq8", "fp32"),
    Precision("int8", "ivf_sq8", "fp16"),
    Precision("int8", "ivf_sq8", "none"),
    Precision("int4", "ivf_sq8", "none"),
)
"""The first precision is the reference. The default settings are int8, hnsw and fp32."""


class Stages(NamedTuple):
    """The stages of a run from which packages are built."""

    dataset: Dataset
    export: ExportManifest
    evaluation: EvaluationManifest

    @classmethod
    def read(cls, run: Path) -> "Stages":
        """Read the stages in the folder of a run."""
        interactions = require_manifest(run / InteractionsManifest.stage, InteractionsManifest)
        has_features = (run / FeaturesManifest.stage).is_dir()
        features = require_manifest(run / FeaturesManifest.stage, FeaturesManifest) if has_features else None
        export = require_manifest(run / ExportManifest.stage, ExportManifest)
        evaluation = require_manifest(run / EvaluationManifest.stage, EvaluationManifest)
        return cls(Dataset(interactions, features=features), export, evaluation)


def build(stages: Stages, precision: Precision, folder: Path) -> PackageManifest:
    """Build the index and the package."""
    index_folder = folder / f"index-{precision.index_kind}"
    index = build_indexes(IndexConfig(served=precision.index_kind), export=stages.export, folder=index_folder)
    config = PackageConfig(quantization=precision.quantization, item_vectors=precision.item_vectors)
    return build_package(
        config,
        export=stages.export,
        index=index,
        dataset=stages.dataset,
        evaluation=stages.evaluation,
        folder=folder / "-".join(precision),
    )


def recall(stages: Stages, package: PackageManifest) -> float:
    """Return the mean recall@K of the test users, each with the history before the test events."""
    store, retriever = EventStore.open(stages.dataset.interactions), Retriever.load(package.folder)
    user_row_U = store.users_with_targets("test")
    item_ids = retriever.item_ids.ids(np.arange(store.num_items))
    histories, targets = store.items_before(user_row_U, "test"), store.targets(user_row_U, "test")
    answers = retriever.recommend(
        None, K, histories=[ids.tolist() for ids in np.split(item_ids[histories.values_L], histories.offset[1:-1])]
    )
    target_ids = np.split(item_ids[targets.values_L], targets.offset[1:-1])
    return float(np.mean([np.isin(ids, best_ids).mean() for ids, best_ids in zip(target_ids, answers.item_ids, strict=True)]))


def measure(run: Path) -> list[dict[str, Any]]:
    """Build and measure a package of each precision."""
    stages, rows = Stages.read(run), []
    with tempfile.TemporaryDirectory(prefix="bench-package-") as folder_name:
        for precision in PRECISIONS:
            package = build(stages, precision, Path(folder_name))
            bytes_by_file = {path.name: path.stat().st_size for path in sorted((package.folder / "package").iterdir())}
            rows.append(precision._asdict() | {"recall": recall(stages, package), "sizes": bytes_by_file})
    return rows


def to_markdown(result: dict[str, Any]) -> str:
    """Return the report."""
    lines = [
        f"This page was written by `python -m benchmarks.package_size` on {result['date']}. The package is that of",
        f"[examples/beauty.yaml](../examples/beauty.yaml), with {result['num_items']:,} items of {result['dim']} numbers and",
        f"{result['num_users']:,} users. Sizes are in kB. `share` is the size compared with the first row, and `change` is the",
        f"change of recall@{K} of the test users.",
        "",
        f"| query tower | index | `item_vectors` | tower | index | items | users | all | share | recall@{K} | change |",
        "|:---|:---|:---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    reference = result["packages"][0]
    reference_bytes = sum(reference["sizes"].values())
    for row in result["packages"]:
        bytes_by_file, all_bytes = row["sizes"], sum(row["sizes"].values())
        model_bytes = [bytes_by_file[name] for name in ("tower.safetensors", "index.faiss", "items.parquet")]
        cells = [f"{size / 1e3:,.0f}" for size in (*model_bytes, sum(bytes_by_file[name] for name in USER_FILES), all_bytes)]
        change = row["recall"] / reference["recall"] - 1
        cells += [f"{all_bytes / reference_bytes:.1%}", f"{row['recall']:.4f}", f"{change:+.2%}"]
        lines.append(f"| {row['quantization']} | {row['index_kind']} | {row['item_vectors']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and write package_size.json and package_size.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run")
    run = parser.parse_args().run
    interactions = require_manifest(run / InteractionsManifest.stage, InteractionsManifest)
    result = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "num_items": interactions.num_items,
        "num_users": interactions.num_users,
        "dim": require_manifest(run / ExportManifest.stage, ExportManifest).dim,
        "packages": measure(run),
    }
    (FOLDER / "package_size.json").write_text(json.dumps(result, indent=2) + "\n")
    (FOLDER / "package_size.md").write_text(to_markdown(result))
    sys.stdout.write(to_markdown(result))


if __name__ == "__main__":
    main()
