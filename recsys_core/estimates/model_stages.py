"""Estimates of the stages that train and measure the model: training, export, evaluation, index, package and registration.

Letters in the formulas: B queries of a rank's batch, C candidates, D width of a vector, U held-out users, I items.
"""

import math
from collections.abc import Mapping

from recsys_core.estimates.data_stages import BENCHMARK_CORES, FLOAT_BYTES, ONE_HOST
from recsys_core.estimates.stage_estimate import Constant, Rates, StageEstimate
from recsys_core.estimates.workload import Workload

FLOPS_PER_SCORE_VALUE = 6
"""Floating-point operations per query, candidate and vector component: a multiplication and an addition in the forward pass,
and two of each in the backward pass."""
BENCHMARK_INDEX_DIM = 64
"""Width of the vectors in benchmarks/index.py."""
BENCHMARK_HISTORY_LENGTH = 20
"""Number of items in a user's history in benchmarks/serve_users.py."""


def num_steps(workload: Workload) -> int:
    """Return the number of training steps: the number of epochs times the number of global batches.

    Below, an epoch has 41 / (10 x 2) global batches, rounded up to 3. A global batch has 10 examples of each of 2 ranks.

    >>> from recsys_core.estimates.workload import DataSizes, Machines, TrainingSizes
    >>> training = TrainingSizes(dim=1, epochs=3, batch_size=10, num_candidates=1, lookups_ms=0, rank_bytes=0, table_bytes=0)
    >>> data = DataSizes(num_users=1, num_items=1, num_events=41, num_held_out_users=0)
    >>> num_steps(Workload(data=data, training=training, indexes=(), package_bytes_per_item=0))
    9
    """
    batch_size = workload.training.batch_size * workload.machines.num_ranks
    return workload.training.epochs * math.ceil(workload.data.num_events / batch_size)


def step_seconds(workload: Workload, rates: Rates) -> float:
    """Return the duration of a training step.

    On a GPU, it is the planner's time of the lookups plus the time of 6 B C D operations at an assumed speed. It is at least
    the time in which the loader reads a batch. On a CPU, it is B times the measured time of a query with its lookups, plus the
    time of 6 B C D operations at the measured speed.
    """
    training = workload.training
    num_operations = FLOPS_PER_SCORE_VALUE * training.batch_size * training.num_candidates * training.dim
    if workload.machines.device == "cuda":
        compute_s = training.lookups_ms / 1000 + num_operations * rates("gpu_operation_s")
        return max(compute_s, rates("loaded_example_s", times=training.batch_size))
    num_items = workload.data.num_items
    # The time of an example does not depend on the number of items, so `times` cancels this number. It is passed only to mark
    # the estimate as extrapolated if the catalogue is larger than in the benchmark.
    example_s = rates("trained_example_s", num_items, times=1 / num_items)
    return training.batch_size * example_s + num_operations * rates("cpu_operation_s")


def train(workload: Workload, constants: Mapping[str, Constant]) -> StageEstimate:
    """Estimate the training on all ranks, without its validations.

    Checkpoints are written in the background. Each rank hashes the files that it has written, so all hosts hash at the same
    time.
    """
    rates, training, machines = Rates(constants), workload.training, workload.machines
    steps_s = num_steps(workload) * step_seconds(workload, rates)
    write_and_hash_byte_s = constants["checkpoint_write_byte_s"].value + constants["checkpoint_hash_byte_s"].value
    checkpoint_s = training.table_bytes * write_and_hash_byte_s / machines.num_hosts
    seconds = rates("rank_start_s") + max(steps_s, checkpoint_s * training.num_saved_checkpoints)
    if checkpoint_s * training.num_saved_checkpoints > steps_s:
        rates("checkpoint_hash_byte_s")  # records that an assumed constant determines the time
    return rates.estimate(
        "train",
        where=_rank_count_text(workload),
        seconds=seconds,
        memory_bytes=training.rank_bytes,
        disk_bytes=training.num_kept_checkpoints * training.table_bytes,
    )


def export(workload: Workload, constants: Mapping[str, Constant]) -> StageEstimate:
    """Estimate the export, which ranks all items for the held-out users: U I D multiplications, divided among the ranks.

    With pretrained vectors, the items are ranked a second time, by these vectors.
    """
    rates, data, machines = Rates(constants), workload.data, workload.machines
    num_pairs = data.num_held_out_users * data.num_items
    constant_name = "ranked_target_value_s" if workload.needs_all_positions else "ranked_value_s"
    if machines.device == "cuda":
        constant_name = "gpu_ranked_value_s"
    pretrained_dim = data.vector_dim if data.num_vectors else 0
    ranking_s = rates(constant_name, num_pairs, times=workload.training.dim + pretrained_dim) / machines.num_ranks
    encoding_s = rates("encoded_vector_s", data.num_items + data.num_held_out_users) / machines.num_ranks
    item_bytes = data.num_items * workload.training.dim * FLOAT_BYTES
    # The two rankings are computed one after the other.
    vector_bytes = (data.num_items + data.num_held_out_users) * max(workload.training.dim, pretrained_dim) * FLOAT_BYTES
    exported_bytes = 2 * item_bytes + constants["exported_user_bytes"].value * data.num_held_out_users
    user_bytes = constants["ranked_user_bytes"].value * data.num_held_out_users
    return rates.estimate(
        "export",
        where=_rank_count_text(workload),
        seconds=rates("rank_start_s") + ranking_s + encoding_s,
        memory_bytes=(vector_bytes + user_bytes) / machines.num_ranks,
        disk_bytes=exported_bytes + workload.training.table_bytes,
    )


def evaluate(workload: Workload, constants: Mapping[str, Constant]) -> StageEstimate:
    """Estimate the evaluation on one host: metrics per held-out user, from the rankings of the export.

    The baselines `closed_form` and `cooccurrence` are ranked in this stage, unless the catalogue is too large for them.
    """
    rates, num_users = Rates(constants), workload.data.num_held_out_users
    seconds = rates("evaluation_start_s") + rates("evaluated_user_s", num_users)
    if workload.has_linear_baselines:
        seconds += rates("linear_baseline_pair_s", num_users * workload.data.num_items)
    return rates.estimate(
        "evaluate",
        where=ONE_HOST,
        seconds=seconds,
        memory_bytes=None,
        disk_bytes=0,
    )


def build_index(workload: Workload, constants: Mapping[str, Constant]) -> StageEstimate:
    """Estimate the index builds on one host. FAISS divides the work among all cores, except for a flat index, which is copied.

    The build time of an IVF index grows with I^1.5, because each vector is compared with 4 sqrt(I) centroids. The build time
    of HNSW grows with I log I, and of a flat index with I. All build times grow with D. One shard of an index is in memory at
    a time.
    """
    rates, num_items = Rates(constants), workload.data.num_items
    seconds, memory_bytes = 0.0, 0.0
    for index_sizes in workload.indexes:
        constant_name = f"index_{index_sizes.kind}_item_s"
        num_benchmark_items = constants[constant_name].measured_at or num_items
        item_time_ratio = _item_time_ratio(index_sizes.kind, num_items, num_benchmark_items=num_benchmark_items)
        core_ratio = 1.0 if index_sizes.kind == "flat" else workload.machines.cores_per_host / BENCHMARK_CORES
        time_ratio = item_time_ratio * index_sizes.build_factor * workload.training.dim / BENCHMARK_INDEX_DIM / core_ratio
        seconds += rates(constant_name, num_items, times=time_ratio)
        shard_bytes = index_sizes.num_bytes / index_sizes.num_shards
        memory_bytes = max(memory_bytes, shard_bytes * constants[f"index_{index_sizes.kind}_memory_factor"].value)
        rates.extrapolate(max(index_sizes.build_factor, core_ratio))
    return rates.estimate(
        "build_index",
        where=ONE_HOST,
        seconds=seconds,
        memory_bytes=memory_bytes,
        disk_bytes=sum(index_sizes.num_bytes for index_sizes in workload.indexes),
    )


def _item_time_ratio(kind: str, num_items: int, *, num_benchmark_items: float) -> float:
    """Return the build time per item, divided by the build time per item of an index with `num_benchmark_items` items.

    >>> [_item_time_ratio(kind, 4_000_000, num_benchmark_items=1e6) for kind in ("flat", "ivf_flat")]
    [1.0, 2.0]
    >>> round(_item_time_ratio("hnsw", 10**12, num_benchmark_items=1e6), 6)  # log 10^12 / log 10^6
    2.0
    """
    if kind == "flat":
        return 1.0
    if kind == "hnsw":
        return math.log(max(num_items, 2)) / math.log(num_benchmark_items)
    return math.sqrt(num_items / num_benchmark_items)


def package(workload: Workload, constants: Mapping[str, Constant]) -> StageEstimate:
    """Estimate the package on one host: the served index, the item vectors, and the histories of all users."""
    rates, data = Rates(constants), workload.data
    history_length_ratio = min(1.0, data.num_events / data.num_users / BENCHMARK_HISTORY_LENGTH)
    user_bytes = constants["package_user_bytes"].value * data.num_users * history_length_ratio
    package_bytes = user_bytes + workload.package_bytes_per_item * data.num_items
    package_bytes += max((index_sizes.num_bytes for index_sizes in workload.indexes), default=0)
    return rates.estimate(
        "package, register",
        where=ONE_HOST,
        seconds=rates("register_s")
        + package_bytes * rates("checkpoint_hash_byte_s")
        + package_bytes * rates("checkpoint_write_byte_s"),
        memory_bytes=None,
        disk_bytes=2 * package_bytes,  # the run folder, and MLflow's copy
    )


def _rank_count_text(workload: Workload) -> str:
    num_ranks = workload.machines.num_ranks
    unit = "GPU" if workload.machines.device == "cuda" else "rank"
    return f"{num_ranks:,} {unit}{'' if num_ranks == 1 else 's'}"
