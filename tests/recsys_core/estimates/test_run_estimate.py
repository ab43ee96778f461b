"""Estimates of the stages, compared with a calculation by hand from round constants."""

import math

import pytest

from recsys_core.estimates.data_stages import BENCHMARK_CORES, check_data, ingest_embeddings, ingest_interactions, store_bytes
from recsys_core.estimates.model_stages import BENCHMARK_INDEX_DIM, build_index, evaluate, export, train
from recsys_core.estimates.run_estimate import estimate_run
from recsys_core.estimates.stage_estimate import Constant, packaged_constants
from recsys_core.estimates.workload import DataSizes, IndexSizes, Machines, TrainingSizes, Workload

DATA_SIZES = DataSizes(num_users=1_000, num_items=100, num_events=10_000, num_held_out_users=500)
TRAINING_SIZES = TrainingSizes(
    dim=8,
    epochs=2,
    batch_size=50,
    num_candidates=150,
    lookups_ms=3,
    rank_bytes=1_000,
    table_bytes=3_200,
    num_kept_checkpoints=3,
)
WORKLOAD = Workload(data=DATA_SIZES, training=TRAINING_SIZES, indexes=(), package_bytes_per_item=40)


def constants_with(**values: float) -> dict[str, Constant]:
    """Return the packaged constants with replaced values. A measured constant then counts as measured at the size 1,000,000."""
    constant_by_name = packaged_constants()
    return constant_by_name | {
        name: constant_by_name[name].model_copy(
            update={"value": value, "measured_at": constant_by_name[name].measured_at and 1e6}
        )
        for name, value in values.items()
    }


def test_an_ingest_with_duckdb_takes_a_time_per_event_and_at_most_its_memory_limit() -> None:
    constants = constants_with(event_s=1e-3, event_memory_bytes=100, part_bytes=10, id_bytes=20)
    estimate = ingest_interactions(DATA_SIZES, Machines(memory_limit_bytes=500_000), constants)
    assert estimate.seconds == pytest.approx(10)
    assert estimate.memory_bytes == 500_000, "10,000 x 100 bytes are more"
    assert estimate.disk_bytes == store_bytes(DATA_SIZES) + 10 * 10_000 + 20 * 1_100
    assert (estimate.basis, estimate.where) == ("measured", "1 host")


def test_an_ingest_with_spark_divides_an_assumed_cpu_time_by_the_number_of_cores() -> None:
    constants = constants_with(event_s=1e-3, spark_cpu_factor=4, spark_start_s=20)
    estimate = ingest_interactions(DATA_SIZES, Machines(engine="spark", num_hosts=5, cores_per_host=8), constants)
    assert estimate.seconds == pytest.approx(10 * 4 * BENCHMARK_CORES / 40 + 20)
    assert (estimate.basis, estimate.where) == ("assumed", "40 cores")


@pytest.mark.parametrize(("has_linear_baselines", "seconds"), [(True, 3 + 5 + 50), (False, 3 + 5)])
def test_an_evaluation_ranks_all_pairs_of_users_and_items_only_for_the_linear_baselines(
    has_linear_baselines: bool, seconds: float
) -> None:
    constants = constants_with(evaluation_start_s=3, evaluated_user_s=1e-2, linear_baseline_pair_s=1e-3)
    workload = WORKLOAD.model_copy(update={"has_linear_baselines": has_linear_baselines})
    assert evaluate(workload, constants).seconds == pytest.approx(seconds)


def test_the_data_report_divides_its_time_by_the_number_of_cores() -> None:
    estimate = check_data(DATA_SIZES, Machines(cores_per_host=64), constants_with(report_start_s=3, report_event_s=1e-3))
    assert estimate.seconds == pytest.approx(3 + 10 * BENCHMARK_CORES / 64)
    assert (estimate.basis, estimate.factor, estimate.where) == ("extrapolated", 64 / BENCHMARK_CORES, "1 host")


def test_an_estimate_above_the_measured_size_is_extrapolated() -> None:
    estimate = ingest_interactions(
        DATA_SIZES.model_copy(update={"num_events": 250 * 10**6}), Machines(), constants_with(event_s=1e-6)
    )
    assert (estimate.basis, estimate.factor) == ("extrapolated", 250)
    data_with_vectors = DATA_SIZES.model_copy(update={"num_vectors": 100, "vector_dim": 10})
    estimate = ingest_embeddings(data_with_vectors, constants_with(vector_value_s=1e-3))
    assert (estimate.basis, estimate.factor) == ("measured", 1)
    assert estimate.seconds == pytest.approx(1)


def test_a_training_step_on_a_cpu_takes_the_time_of_its_examples_and_its_scores() -> None:
    constants = constants_with(trained_example_s=1e-4, cpu_operation_s=1e-9, rank_start_s=7)
    step_s = 50 * 1e-4 + 6 * 50 * 150 * 8 * 1e-9
    assert train(WORKLOAD, constants).seconds == pytest.approx(7 + 2 * 100 * step_s), "10,000 examples are 100 steps of 2 x 50"


def test_a_training_step_on_a_gpu_takes_at_least_the_time_of_its_loader() -> None:
    machines = Machines(device="cuda", num_hosts=2, ranks_per_host=1)
    workload = WORKLOAD.model_copy(update={"machines": machines})
    constants_of_fast_loader = constants_with(gpu_operation_s=1e-9, loaded_example_s=1e-9, rank_start_s=0)
    step_s = 3e-3 + 6 * 50 * 150 * 8 * 1e-9
    estimate = train(workload, constants_of_fast_loader)
    assert estimate.seconds == pytest.approx(200 * step_s)
    assert (estimate.basis, estimate.where) == ("assumed", "2 GPUs")
    constants_of_slow_loader = constants_with(gpu_operation_s=1e-9, loaded_example_s=1e-3, rank_start_s=0)
    assert train(workload, constants_of_slow_loader).seconds == pytest.approx(200 * 50 * 1e-3)


@pytest.mark.parametrize("num_hosts", [1, 4])
def test_a_training_takes_at_least_as_long_as_its_checkpoints(num_hosts: int) -> None:
    constants = constants_with(checkpoint_write_byte_s=2e-3, checkpoint_hash_byte_s=1e-3, rank_start_s=0, trained_example_s=0)
    training_sizes, machines = TRAINING_SIZES.model_copy(update={"num_saved_checkpoints": 10}), Machines(num_hosts=num_hosts)
    estimate = train(WORKLOAD.model_copy(update={"training": training_sizes, "machines": machines}), constants)
    assert estimate.seconds == pytest.approx(10 * 3_200 * 3e-3 / num_hosts)
    assert estimate.basis == "assumed"
    assert estimate.disk_bytes == 3 * 3_200


@pytest.mark.parametrize("num_hosts", [1, 2])
def test_an_export_divides_its_time_and_memory_among_the_ranks(num_hosts: int) -> None:
    constants = constants_with(ranked_target_value_s=1e-6, encoded_vector_s=1e-3, rank_start_s=7, ranked_user_bytes=10)
    num_ranks = 2 * num_hosts
    estimate = export(WORKLOAD.model_copy(update={"machines": Machines(num_hosts=num_hosts)}), constants)
    assert estimate.seconds == pytest.approx(7 + (500 * 100 * 8 * 1e-6 + 600 * 1e-3) / num_ranks)
    assert estimate.memory_bytes == pytest.approx((600 * 8 * 4 + 500 * 10) / num_ranks)


def test_an_index_in_four_shards_takes_a_quarter_of_the_memory() -> None:
    whole_estimate, sharded_estimate = (
        build_index(
            WORKLOAD.model_copy(update={"indexes": (IndexSizes(kind="ivf_flat", num_bytes=2**30, num_shards=num_shards),)}),
            packaged_constants(),
        )
        for num_shards in (1, 4)
    )
    assert whole_estimate.memory_bytes is not None
    assert sharded_estimate.memory_bytes == pytest.approx(whole_estimate.memory_bytes / 4)
    assert (sharded_estimate.seconds, sharded_estimate.disk_bytes) == (whole_estimate.seconds, whole_estimate.disk_bytes)


def test_an_ivf_index_of_four_times_the_items_takes_eight_times_as_long() -> None:
    index_sizes = IndexSizes(kind="ivf_flat", num_bytes=100)
    workloads = [
        WORKLOAD.model_copy(update={"data": DATA_SIZES.model_copy(update={"num_items": num_items}), "indexes": (index_sizes,)})
        for num_items in (10**6, 4 * 10**6)
    ]
    small_estimate, large_estimate = (build_index(workload, packaged_constants()) for workload in workloads)
    assert large_estimate.seconds == pytest.approx(8 * small_estimate.seconds)
    assert (small_estimate.basis, large_estimate.basis) == ("measured", "extrapolated")


def test_all_indexes_except_flat_are_built_faster_on_more_cores() -> None:
    indexes = [IndexSizes(kind=kind, num_bytes=100) for kind in ("flat", "hnsw")]
    flat_seconds, hnsw_seconds = (
        [
            build_index(
                WORKLOAD.model_copy(update={"indexes": (index_sizes,), "machines": Machines(cores_per_host=num_cores)}),
                packaged_constants(),
            ).seconds
            for num_cores in (2, 64)
        ]
        for index_sizes in indexes
    )
    assert flat_seconds[0] == flat_seconds[1]
    assert hnsw_seconds[0] == pytest.approx(64 / 2 * hnsw_seconds[1])


def test_an_index_with_slower_settings_than_in_the_benchmark_is_extrapolated() -> None:
    index_sizes = IndexSizes(kind="hnsw", num_bytes=100, build_factor=3)
    estimate = build_index(WORKLOAD.model_copy(update={"indexes": (index_sizes,)}), constants_with(index_hnsw_item_s=1e-3))
    assert estimate.seconds == pytest.approx(100 * 3 * 1e-3 * 8 / BENCHMARK_INDEX_DIM * math.log(100) / math.log(1e6))
    assert (estimate.basis, estimate.factor) == ("extrapolated", 3)


def test_a_run_takes_the_sum_of_its_stages_and_ingests_vectors_only_if_there_are_some() -> None:
    estimate = estimate_run(WORKLOAD)
    assert estimate.seconds == pytest.approx(sum(stage.seconds for stage in estimate.stages))
    assert estimate.stages[0].stage == "ingest_interactions"
    data_with_vectors = DATA_SIZES.model_copy(update={"num_vectors": 100, "vector_dim": 8})
    estimate_with_vectors = estimate_run(WORKLOAD.model_copy(update={"data": data_with_vectors}))
    assert estimate_with_vectors.stages[0].stage == "ingest_embeddings"
    export_s, export_with_vectors_s = (
        {stage.stage: stage.seconds for stage in run_estimate.stages}["export"]
        for run_estimate in (estimate, estimate_with_vectors)
    )
    assert export_with_vectors_s > export_s, "the items are also ranked by pretrained vectors"


def test_a_run_on_twice_as_much_of_any_data_takes_more_time_or_disk() -> None:
    machines = Machines(num_hosts=4, ranks_per_host=8, cores_per_host=16, engine="spark", device="cuda")
    data_sizes = DataSizes(
        num_users=10**9, num_items=10**8, num_events=10**10, num_held_out_users=10**6, num_vectors=10**8, vector_dim=64
    )
    indexes = (IndexSizes(kind="ivf_sq8", num_bytes=10**10),)
    workload = Workload(
        data=data_sizes, training=TRAINING_SIZES, indexes=indexes, package_bytes_per_item=100, machines=machines
    )
    for doubled_field in ("num_users", "num_items", "num_events", "num_held_out_users", "num_vectors"):
        larger_data_sizes = data_sizes.model_copy(update={doubled_field: 2 * getattr(data_sizes, doubled_field)})
        larger_estimate = estimate_run(workload.model_copy(update={"data": larger_data_sizes}))
        stage_pairs = zip(estimate_run(workload).stages, larger_estimate.stages, strict=True)
        growths = [
            (larger_stage.seconds - stage.seconds, larger_stage.disk_bytes - stage.disk_bytes)
            for stage, larger_stage in stage_pairs
        ]
        assert any(seconds > 0 or num_bytes > 0 for seconds, num_bytes in growths), doubled_field
    assert {stage.basis for stage in estimate_run(workload).stages} == {"extrapolated", "assumed"}
