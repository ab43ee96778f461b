"""All checks of an installation, for `nightjar doctor FILE`."""

from flows.config import PipelineConfig
from flows.doctor.finding import Finding, run_checks
from flows.doctor.machine import SHARED_MEMORY, check_devices, check_network, check_shared_memory
from flows.doctor.servers import check_clocks, check_mlflow, check_prefect, check_schedule, check_worker
from flows.doctor.workspace import check_disk, check_previous_run
from recsys_core.preflight import Gpu


def examine(config: PipelineConfig, *, gpus: tuple[Gpu, ...]) -> dict[str, Finding]:
    """Return the findings of all checks of the installation of `config`, by subject. Nothing is created or changed.

    Args:
        gpus: GPUs of this machine that torch can use.
    """
    return run_checks(
        {
            "Prefect server": check_prefect,
            "MLflow server": lambda: check_mlflow(config),
            "schedule": lambda: check_schedule(config),
            "worker": lambda: check_worker(config),
            "clocks": lambda: check_clocks(config),
            "previous run": lambda: check_previous_run(config),
            "disk": lambda: check_disk(config.workspace),
            "shared memory": lambda: check_shared_memory(SHARED_MEMORY),
            "devices": lambda: check_devices(config, gpus=gpus),
            "network": lambda: check_network(config),
        }
    )
