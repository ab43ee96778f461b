"""The estimate of a complete run: its stages, and the costs of the machines at assumed prices."""

from collections.abc import Mapping

from recsys_core.config import Frozen
from recsys_core.estimates import data_stages, model_stages
from recsys_core.estimates.stage_estimate import Constant, StageEstimate, packaged_constants
from recsys_core.estimates.workload import Machines, Workload

SECONDS_PER_HOUR = 3600


class RunEstimate(Frozen):
    """Estimates of the stages, in the order of a run. dollars: costs of the machines at the assumed prices."""

    workload: Workload
    stages: tuple[StageEstimate, ...]
    dollars: float

    @property
    def seconds(self) -> float:
        """Duration of all stages, one after the other."""
        return sum(stage.seconds for stage in self.stages)

    @property
    def disk_bytes(self) -> float:
        """Bytes that all stages leave on disk."""
        return sum(stage.disk_bytes for stage in self.stages)


def estimate_run(workload: Workload) -> RunEstimate:
    """Estimate the stages of a first run."""
    constants, data = packaged_constants(), workload.data
    stages = [
        data_stages.ingest_interactions(data, workload.machines, constants),
        data_stages.check_data(data, workload.machines, constants),
        model_stages.train(workload, constants),
        model_stages.export(workload, constants),
        model_stages.evaluate(workload, constants),
        model_stages.build_index(workload, constants),
        model_stages.package(workload, constants),
    ]
    if data.num_vectors:
        stages.insert(0, data_stages.ingest_embeddings(data, constants))
    return RunEstimate(
        workload=workload,
        stages=tuple(stages),
        dollars=sum(stage_dollars(stage, workload.machines, constants) for stage in stages),
    )


def stage_dollars(stage: StageEstimate, machines: Machines, constants: Mapping[str, Constant]) -> float:
    """Return the costs of a stage in dollars: its GPUs, if it uses any, and all cores of its hosts.

    >>> stage = StageEstimate(
    ...     stage="train", where="8 GPUs", seconds=7200, memory_bytes=0, disk_bytes=0, constants=(), basis="assumed"
    ... )
    >>> prices = {"gpu_hour_dollars": 2.5, "core_hour_dollars": 0.05}
    >>> prices = {name: Constant(value=price, unit="dollars per hour", source="") for name, price in prices.items()}
    >>> machines = Machines(device="cuda", ranks_per_host=8, cores_per_host=10)
    >>> stage_dollars(stage, machines, prices)  # 2 h x (8 x 2.5 + 10 x 0.05)
    41.0
    """
    hours = stage.seconds / SECONDS_PER_HOUR
    is_on_one_host = stage.where == data_stages.ONE_HOST
    num_cores = machines.cores_per_host * (1 if is_on_one_host else machines.num_hosts)
    uses_gpus = machines.device == "cuda" and stage.stage in ("train", "export")
    gpu_dollars = machines.num_ranks * constants["gpu_hour_dollars"].value if uses_gpus else 0.0
    return hours * (gpu_dollars + num_cores * constants["core_hour_dollars"].value)
