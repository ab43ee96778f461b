"""The ingest beside pandas, and the loader beside the training step.

make bench-ingest          # writes benchmarks/ingest.json and benchmarks/ingest.md; about 20 minutes and 10 GB of disk
"""

import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import ingest_embeddings, ingest_interactions, loader
from recsys_core.preflight import installed_versions

FOLDER = Path(__file__).parent
PARTS = {
    "Interactions": ingest_interactions,
    "Vectors": ingest_embeddings,
    "Loader": loader,
}


def main() -> None:
    """Measures one part after the other; a part is written as soon as it is there."""
    versions = installed_versions()
    results = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "cores": len(os.sched_getaffinity(0)),
        "versions": {name: versions[name] for name in ("torch", "torchrec", "duckdb", "pyarrow", "pandas") if name in versions},
    }
    lines = [
        f"Made on {results['date']} on {results['cores']} cores by `make bench-ingest`; "
        + ", ".join(f"{name} {version}" for name, version in results["versions"].items())
        + ".",
        "",
    ]
    for title, part in PARTS.items():
        sys.stderr.write(f"{title} ...\n")
        found = part.measure()
        results[title.lower()] = found
        lines += [f"## {title}", "", part.to_markdown(found)]
        (FOLDER / "ingest.json").write_text(json.dumps(results, indent=2) + "\n")
        (FOLDER / "ingest.md").write_text("\n".join(lines))
    sys.stdout.write("\n".join(lines))


if __name__ == "__main__":
    main()
