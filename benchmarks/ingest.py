"""Benchmark of the ingest, compared with pandas, and of the loader.

Commands:

    make bench-ingest                    # writes benchmarks/ingest.json and ingest.md; about 15 minutes and 10 GB of disk
    python -m benchmarks.ingest loader   # repeats one part: interactions, vectors or loader
"""

import json
import os
import sys
from datetime import UTC, datetime
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import ingest_embeddings, ingest_interactions, loader
from recsys_core.preflight import installed_versions

FOLDER = Path(__file__).parent
BENCHMARK_BY_TITLE: dict[str, Any] = {
    "Interactions": ingest_interactions,
    "Vectors": ingest_embeddings,
    "Loader": loader,
}


def main() -> None:
    """Measure the parts named by the arguments, or all parts, and write the results after each part."""
    titles = [title for title in BENCHMARK_BY_TITLE if not sys.argv[1:] or title.lower() in sys.argv[1:]]
    versions = installed_versions()
    if find_spec("polars"):
        versions["polars"] = metadata.version("polars")
    results: dict[str, Any] = json.loads((FOLDER / "ingest.json").read_text()) if sys.argv[1:] else {}
    for title in titles:
        sys.stderr.write(f"{title} ...\n")
        results[title.lower()] = BENCHMARK_BY_TITLE[title].measure() | {
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "cores": len(os.sched_getaffinity(0)),
            "versions": {
                name: versions[name] for name in ("torch", "torchrec", "duckdb", "pyarrow", "polars") if name in versions
            },
        }
        (FOLDER / "ingest.json").write_text(json.dumps(results, indent=2) + "\n")
        (FOLDER / "ingest.md").write_text(_to_markdown(results))
    sys.stdout.write(_to_markdown(results))


def _to_markdown(results: dict[str, Any]) -> str:
    lines = ["This page was written by `make bench-ingest`.", ""]
    for title in (title for title in BENCHMARK_BY_TITLE if title.lower() in results):
        result = results[title.lower()]
        versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
        lines += [
            f"## {title}",
            "",
            f"Measured on {result['date']} on {result['cores']} cores with {versions}.",
            "",
            BENCHMARK_BY_TITLE[title].to_markdown(result),
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
