"""Metrics of the server in Prometheus' text format, added up over all processes.

The variable PROMETHEUS_MULTIPROC_DIR names the folder in which each process keeps its values. prometheus_client reads the
variable when it is imported.
"""

from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
_SECONDS_BUCKETS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

REQUESTS = Counter("nightjar_requests", "Requests by path and status", ["path", "status"])
REQUEST_SECONDS = Histogram(
    "nightjar_request_seconds", "Seconds from the request to its answer", ["path"], buckets=_SECONDS_BUCKETS
)
BATCH_ROWS = Histogram("nightjar_batch_rows", "Rows of the requests that share a search", buckets=_ROW_BUCKETS)
PREDICTIONS = Counter("nightjar_predictions", "Predictions by version and origin of the items", ["version", "fallback"])
VERSION = Gauge("nightjar_version", "Number of the version that is served", multiprocess_mode="livemin")
SWAPS = Counter("nightjar_swaps", "Attempts to replace the served version, by result", ["result"])
REGISTRY_UP = Gauge("nightjar_registry_up", "Whether the registry answered the last request", multiprocess_mode="livemin")


def as_text() -> bytes:
    """Return the metrics of all processes in Prometheus' text format."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return generate_latest(registry)
