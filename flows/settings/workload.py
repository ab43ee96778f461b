"""The sizes of a run of a pipeline, for the estimates of `nightjar plan`."""

from flows.settings.pipeline import PipelineConfig
from recsys_core.dataset.events import EventStore
from recsys_core.errors import InputError
from recsys_core.estimates.model_stages import num_steps
from recsys_core.estimates.workload import DataSizes, IndexSizes, Machines, TrainingSizes, Workload
from recsys_core.manifests import Dataset
from recsys_core.models.spec import ModelSpec
from recsys_core.models.tables.table_config import ID_TABLES, ITEM_TABLES
from recsys_core.retrieval.kinds import AnyIndexKind, Hnsw
from recsys_core.sharding.lookup_stats import LookupStats, num_distinct_items
from recsys_core.sharding.plan_file import PlanFile
from recsys_core.sharding.planner import make_plan, resolve_cluster

BENCHMARK_EF_CONSTRUCTION = 64
"""`ef_construction` of the HNSW index in benchmarks/index.json. The build time is proportional to `ef_construction`."""
POPULARITY_EXPONENT = 1.0
"""Exponent of Zipf's law, from which the popularity of items is estimated if there is no log yet."""
_PACKAGED_VALUE_BYTES = {"fp32": 4.0, "fp16": 2.0, "int8": 1.0, "int4": 0.5, "none": 0.0}


def data_of_dataset(config: PipelineConfig, dataset: Dataset) -> DataSizes:
    """Return the sizes of ingested data. All events count as training events."""
    manifest, store = dataset.interactions, EventStore.open(dataset.interactions)
    num_test_users = len(store.users_with_targets("test"))
    vector_dims = dataset.vector_dim_by_table.values()
    return DataSizes(
        num_users=manifest.num_users,
        num_items=manifest.num_items,
        num_events=manifest.num_events,
        num_held_out_users=min(num_test_users, config.evaluation.max_users or num_test_users),
        num_vectors=manifest.num_items_with_vector if vector_dims else 0,
        vector_dim=max(vector_dims, default=0),
        has_times=store.has_times,
    )


def data_of_sizes(config: PipelineConfig, *, num_users: int, num_items: int, num_events: int) -> DataSizes:
    """Return the sizes of data that does not exist yet. Every user is a test user, up to evaluation.max_users."""
    has_vectors = any(vectors_config.table == "item" for vectors_config in config.embeddings)
    return DataSizes(
        num_users=num_users,
        num_items=num_items,
        num_events=num_events,
        num_held_out_users=min(num_users, config.evaluation.max_users or num_users),
        num_vectors=num_items if has_vectors else 0,
        vector_dim=config.model.embedding_dim if has_vectors else 0,
        has_times=config.interactions.timestamp_column is not None,
    )


def plan_for_sizes(config: PipelineConfig, data: DataSizes) -> PlanFile:
    """Return the sharding plan for data that does not exist yet: tables of items and users, without features.

    Histories are full, and popularity follows Zipf's law.
    """
    tables = {name: table for name, table in config.tables.items() if name in (*ITEM_TABLES, "user")}
    constraints = {name: table for name, table in config.sharding.tables.items() if name in (*ITEM_TABLES, "user")}
    model = ModelSpec.sized(
        config.model,
        num_users=data.num_users,
        num_items=data.num_items,
        vector_dim_by_table={
            vectors_config.table: config.model.embedding_dim
            for vectors_config in config.embeddings
            if vectors_config.table in ID_TABLES
        },
        tables=tables,
        has_distillation=config.loss.distillation is not None,
        optimizer=config.training.table_optimizer,
    )
    batch_size = config.training.batch_size
    num_distinct_rows = num_distinct_items(
        data.num_items,
        num_draws=batch_size * (1 + model.history_length),
        num_negatives=config.loss.num_sampled_negatives,
        exponent=POPULARITY_EXPONENT,
    )
    if config.loss.negatives == "all":  # a rank also looks up its share of the items
        _, processes_per_node = resolve_cluster(config.sharding.cluster)
        num_ranks = config.sharding.cluster.num_nodes * processes_per_node
        num_distinct_rows += (data.num_items - num_distinct_rows) / num_ranks
    values_per_query = {
        name: num_distinct_rows / batch_size if table.side == "item" else 1.0 for name, table in model.tables.items()
    }
    return make_plan(
        config.sharding.model_copy(update={"tables": constraints}),
        model=model,
        batch_size=batch_size,
        lookup_stats=LookupStats(values_per_query=values_per_query, hot_row_curve={}),
    )


def workload_of(config: PipelineConfig, data: DataSizes, *, plan: PlanFile, machines: Machines) -> Workload:
    """Return everything on which the estimates depend.

    Args:
        machines: the hosts, with the number of ranks in `plan`.
    """
    table_bytes = sum(memory.weights + memory.optimizer for rank in plan.ranks for memory in rank.tables.values())
    training = TrainingSizes(
        dim=config.model.output_dim,
        epochs=config.training.epochs,
        batch_size=plan.batch_size,
        num_candidates=_num_candidates(config, data, num_ranks=plan.world_size),
        lookups_ms=plan.step_ms,
        rank_bytes=max(getattr(rank, plan.lookup_memory_field) for rank in plan.ranks),
        table_bytes=table_bytes,
    )
    built_indexes = config.index.indexes_to_build(num_items=data.num_items, dim=config.model.output_dim)
    workload = Workload(
        data=data,
        training=training,
        indexes=tuple(_index_sizes(index, config, data) for index in built_indexes),
        package_bytes_per_item=_package_bytes_per_item(config),
        needs_all_positions="auc" in config.evaluation.metrics,
        has_linear_baselines=bool(config.evaluation.linear_baselines(data.num_items)),
        machines=machines,
    )
    num_checkpoints_by_field = {
        "num_saved_checkpoints": config.training.num_saved_checkpoints(num_steps=num_steps(workload)),
        "num_kept_checkpoints": config.training.max_num_checkpoints(num_steps=num_steps(workload)),
    }
    return workload.model_copy(update={"training": training.model_copy(update=num_checkpoints_by_field)})


def _num_candidates(config: PipelineConfig, data: DataSizes, *, num_ranks: int) -> int:
    """Return the number of candidates whose scores a rank computes for each query."""
    loss = config.loss
    if loss.negatives == "all":
        return data.num_items
    num_candidates = loss.num_negatives + loss.explicit_negatives
    if loss.in_batch_negatives or (loss.in_batch_negatives is None and loss.kind == "softmax"):
        num_candidates += config.training.batch_size
    return max(1, num_candidates * (num_ranks if loss.cross_rank_negatives else 1))


def _index_sizes(index: AnyIndexKind, config: PipelineConfig, data: DataSizes) -> IndexSizes:
    build_factor = index.ef_construction / BENCHMARK_EF_CONSTRUCTION if isinstance(index, Hnsw) else 1.0
    num_items, dim = data.num_items, config.model.output_dim
    return IndexSizes(
        kind=index.kind,
        num_bytes=index.min_bytes(num_items=num_items, dim=dim),
        num_shards=config.index.num_shards(index, num_items=num_items, dim=dim),
        build_factor=build_factor,
    )


def _package_bytes_per_item(config: PipelineConfig) -> float:
    """Return the packaged bytes per item: the item's row in the query tower and the item's vector."""
    row_bytes = _PACKAGED_VALUE_BYTES[config.package.quantization] * config.model.embedding_dim
    return row_bytes + _PACKAGED_VALUE_BYTES[config.package.item_vectors] * config.model.output_dim


def check_sizes(num_users: int | None, num_items: int | None, num_events: int | None) -> None:
    """Raise InputError if only some of the sizes are given."""
    sizes = {"--users": num_users, "--items": num_items, "--events": num_events}
    missing_options = [option for option, size in sizes.items() if size is None]
    if missing_options and len(missing_options) < len(sizes):
        given_options = ", ".join(option for option in sizes if option not in missing_options)
        raise InputError(
            f"{given_options} without {', '.join(missing_options)}: set all three, or none to plan for the data of the config"
        )
