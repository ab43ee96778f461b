"""The ingest beside pandas, and the loader beside the training step.

make bench-ingest                    # writes benchmarks/ingest.json and ingest.md; about 15 minutes and 10 GB of disk
    python -m benchmarks.ingest loader   # one part anew: interactions, vectors or loader
"""

import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import ingest_embeddings, ingest_interactions, loader
from recsys_core.preflight import installed_versions

FOLDER = Path(__file__).parent
PARTS: dict[str, Any] = {
    "Interactions": ingest_interactions,
    "Vectors": ingest_embeddings,
    "Loader": loader,
}


def main() -> None:
    """Measures the parts that the arguments name, or all; each is written down as soon as it is there."""
    wanted = [title for title in PARTS if not sys.argv[1:] or title.lower() in sys.argv[1:]]
    versions = installed_versions()
    results: dict[str, Any] = json.loads((FOLDER / "ingest.json").read_text()) if sys.argv[1:] else {}
    for title in wanted:
        sys.stderr.write(f"{title} ...\n")
        results[title.lower()] = PARTS[title].measure() | {
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "cores": len(os.sched_getaffinity(0)),
            "versions": {name: versions[name] for name in ("torch", "torchrec", "duckdb", "pyarrow") if name in versions},
        }
        (FOLDER / "ingest.json").write_text(json.dumps(results, indent=2) + "\n")
        (FOLDER / "ingest.md").write_text(_to_markdown(results))
    sys.stdout.write(_to_markdown(results))


def _to_markdown(results: dict[str, Any]) -> str:
    lines = ["By `make bench-ingest`.", ""]
    for title in (title for title in PARTS if title.lower() in results):
        found = results[title.lower()]
        made = f"Made on {found['date']} on {found['cores']} cores; "
        made += ", ".join(f"{name} {version}" for name, version in found["versions"].items())
        lines += [f"## {title}", "", f"{made}.", "", PARTS[title].to_markdown(found)]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
