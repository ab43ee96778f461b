"""Benchmark of the truncated SVD, which is the baseline `closed_form` of large catalogues, with several exponents.

    python -m benchmarks.closed_form      # writes benchmarks/closed_form.json

The model is computed from the training events, and the metrics from the validation events. No test event is read.
"""

import json
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.measuring import ROOT
from benchmarks.quality import beauty, citeulike, ml1m
from flows.settings.config_file import load_config
from flows.settings.template import write_demo
from recsys_core.dataset.events import EventStore
from recsys_core.evaluation.closed_form import MAX_EXPONENT_SEARCH_USERS, validation_positions
from recsys_core.evaluation.config import ClosedFormConfig
from recsys_core.evaluation.metrics import ndcg, recall
from recsys_core.ingest.log.config import InteractionsConfig
from recsys_core.ingest.log.ingest import ingest_interactions

DATA_FOLDER = ROOT.parent / "shared" / "data"
CONFIG = ClosedFormConfig()


def logs(folder: Path) -> Iterator[tuple[str, InteractionsConfig]]:
    """Yield the name and the settings of each log."""
    for name, settings in (
        ("Amazon Beauty", beauty.settings(DATA_FOLDER / "beauty")),
        ("citeulike_t", citeulike.settings(DATA_FOLDER / "citeulike_t", test_kind="warm")),
        ("ml1m", ml1m.settings(DATA_FOLDER / "ml1m")),
    ):
        yield name, InteractionsConfig.model_validate(settings["interactions"])
    yield "demo", load_config(write_demo(folder / "demo")).interactions


def measure(config: InteractionsConfig, *, folder: Path) -> list[dict[str, float]]:
    """Return the mean metrics over the validation users, for each item exponent."""
    store = EventStore.open(ingest_interactions(config, embeddings=None, folder=folder))
    results = []
    for item_exponent, positions in validation_positions(CONFIG, store=store):
        metrics = {"recall@20": recall(positions, k=20), "ndcg@20": ndcg(positions, k=20)}
        mean_by_metric = {name: round(float(value_B.mean()), 4) for name, value_B in metrics.items()}
        results.append({"item_exponent": item_exponent} | mean_by_metric)
    return results


def main() -> None:
    """Measure each log, and write the results."""
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        results_by_log: dict[str, Any] = {
            name: measure(config, folder=folder / "stages" / name) for name, config in logs(folder)
        }
    settings = {"rank": CONFIG.rank, "user_exponent": CONFIG.user_exponent, "max_users": MAX_EXPONENT_SEARCH_USERS}
    output = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "split": "validation", "settings": settings, "logs": results_by_log}
    Path(__file__).with_suffix(".json").write_text(json.dumps(output, indent=1) + "\n")


if __name__ == "__main__":
    main()
