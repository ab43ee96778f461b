"""Estimates of the stages that read the data: ingest of vectors and of the log, and the data report."""

from collections.abc import Mapping

from recsys_core.estimates.stage_estimate import Constant, Rates, StageEstimate
from recsys_core.estimates.workload import DataSizes, Machines

INT32_LIMIT = 2**31
FLOAT_BYTES, TIME_BYTES, OFFSET_BYTES = 4, 8, 8
ONE_HOST = "1 host"
BENCHMARK_CORES = 2
"""The constants were measured on this many cores."""


def store_bytes(data: DataSizes) -> int:
    """Return the bytes of the event store: the arrays of events, users and items.

    An event has the row of its item, the row of its user and, if the log has times, a time. A user has three offsets. An item
    has a count, a popularity rank and the row of its vector. A row number has 4 bytes, or 8 bytes if there are more than 2^31
    rows.

    >>> data = DataSizes(num_users=10, num_items=5, num_events=100, num_held_out_users=0)
    >>> store_bytes(data)  # 100 x (4 + 4 + 8) + 10 x 24 + 5 x 24
    1960
    >>> store_bytes(data.model_copy(update={"num_items": 2**31 + 10})) - 24 * (2**31 + 10)  # 100 x (8 + 4 + 8) + 10 x 24
    2240
    """
    item_bytes, user_bytes = (4 if num_rows < INT32_LIMIT else 8 for num_rows in (data.num_items, data.num_users))
    event_bytes = item_bytes + user_bytes + (TIME_BYTES if data.has_times else 0)
    return data.num_events * event_bytes + 3 * OFFSET_BYTES * (data.num_users + data.num_items)


def ingest_embeddings(data: DataSizes, constants: Mapping[str, Constant]) -> StageEstimate:
    """Estimate the ingest of pretrained vectors on one host."""
    rates, num_values = Rates(constants), data.num_vectors * data.vector_dim
    seconds = rates("vector_value_s", num_values)
    return rates.estimate(
        "ingest_embeddings",
        where=ONE_HOST,
        seconds=seconds,
        memory_bytes=constants["vector_memory_bytes"].value,
        disk_bytes=num_values * FLOAT_BYTES + constants["id_bytes"].value * data.num_vectors,
    )


def ingest_interactions(data: DataSizes, machines: Machines, constants: Mapping[str, Constant]) -> StageEstimate:
    """Estimate the first ingest of a log, which reads all events.

    DuckDB runs on one host. Its time is estimated for the cores of the benchmark, because more cores were not measured. The
    CPU time of Spark is an assumed multiple of DuckDB's CPU time, and is divided among the cores of all hosts. The store, the
    parts and the ids are written once.
    """
    rates = Rates(constants)
    seconds = rates("event_s", data.num_events)
    memory_bytes = min(constants["event_memory_bytes"].value * data.num_events, machines.memory_limit_bytes)
    where = ONE_HOST
    if machines.engine == "spark":
        num_cores = machines.num_hosts * machines.cores_per_host
        seconds *= rates("spark_cpu_factor") * BENCHMARK_CORES / num_cores
        seconds += rates("spark_start_s")
        memory_bytes = machines.cores_per_host * constants["spark_core_memory_bytes"].value
        where = f"{num_cores:,} cores"
    vocabulary_bytes = constants["id_bytes"].value * (data.num_users + data.num_items)
    return rates.estimate(
        "ingest_interactions",
        where=where,
        seconds=seconds,
        memory_bytes=memory_bytes,
        disk_bytes=store_bytes(data) + constants["part_bytes"].value * data.num_events + vocabulary_bytes,
    )


def check_data(data: DataSizes, machines: Machines, constants: Mapping[str, Constant]) -> StageEstimate:
    """Estimate the data report. All cores of one host count the events."""
    rates, core_ratio = Rates(constants), machines.cores_per_host / BENCHMARK_CORES
    seconds = rates("report_start_s") + rates("report_event_s", data.num_events, times=1 / core_ratio)
    rates.extrapolate(core_ratio)
    return rates.estimate(
        "check_data",
        where=ONE_HOST,
        seconds=seconds,
        memory_bytes=None,
        disk_bytes=0,
    )
