"""Checks of an installation for `nightjar doctor FILE`: servers, workspace, shared memory, devices and network interfaces."""

import os
import shutil
from datetime import UTC, datetime
from pathlib import Path

from flows.doctor.finding import Finding, not_used, ok, problem, run_checks
from flows.doctor.servers import check_clocks, check_mlflow, check_prefect, check_schedule, check_worker
from flows.settings.pipeline import PipelineConfig
from recsys_core.disk import free_bytes
from recsys_core.launching.config import LOCAL_SCHEDULERS, LOOPBACK_INTERFACE, LocalLauncher
from recsys_core.launching.hosts.network import interface_addresses
from recsys_core.preflight import Gpu
from recsys_core.units import MIB, format_gib
from tasks.runs.run_record import RunRecord
from tasks.runs.workspace import Workspace

DISK_RESERVE_FACTOR = 1.2
"""Free space that a run needs, as a multiple of the size of the previous run."""
ADVICE_BY_STATE = {
    "Failed": "resume it with --resume {run_id}",
    "Interrupted": "resume it with --resume {run_id}",
    "DataRejected": "read check_data/report.html in its folder, then correct the data or the limits of data_report",
    "BrokenChampion": "return to a former champion with nightjar rollback --reason TEXT",
}
"""States of a run after which a person must act, each with the next step."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 the mount point is a convention of Linux
MIN_SHARED_MEMORY_BYTES = 128 * MIB
"""Twice the default of container engines. With the default size, NCCL fails to start."""
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


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


def check_disk(workspace: Path) -> Finding:
    """Compare the free space of the workspace's disk with the size of the previous run."""
    num_free_bytes = free_bytes(workspace)
    run = Workspace(workspace).newest_run()
    if run is None:
        return ok(f"{format_gib(num_free_bytes)} free in {workspace}; no run yet")
    run_bytes = sum(path.stat(follow_symlinks=False).st_size for path in run.folder.rglob("*") if path.is_file())
    disk_text = f"{format_gib(num_free_bytes)} free in {workspace}; run {run.run_id} takes {format_gib(run_bytes)}"
    if num_free_bytes < DISK_RESERVE_FACTOR * run_bytes:
        return problem(
            f"{disk_text}, and the next run needs about the same space; remove old runs, or set workspace to a larger disk"
        )
    return ok(disk_text)


def check_previous_run(config: PipelineConfig) -> Finding:
    """Report when the newest run ended and in which state; a failed, rejected or overdue run is a problem."""
    run = Workspace(config.workspace).newest_run()
    if run is None:
        return not_used("no run yet")
    record = RunRecord.read(run)
    if record is None:
        return not_used(f"run {run.run_id} has no run.json: an older version of nightjar made it")
    if record.state == "Running":
        minutes = (datetime.now(UTC) - record.started).total_seconds() / 60
        run_text = f"run {run.run_id} is running for {minutes:,.0f} minutes (process {record.pid} on {record.host})"
        deadline = config.schedule.deadline_minutes
        if deadline is not None and minutes > deadline:
            return problem(
                f"{run_text}, longer than schedule.deadline_minutes {deadline}; read its log in Prefect, or cancel it"
            )
        return ok(run_text)
    end_time = "" if record.ended is None else f" at {record.ended:%Y-%m-%d %H:%M} UTC"
    run_text = f"run {run.run_id} ended{end_time}: {record.state}{f', {record.message}' if record.message else ''}"
    if record.state in ADVICE_BY_STATE:
        return problem(f"{run_text}; {ADVICE_BY_STATE[record.state].format(run_id=run.run_id)}")
    return ok(run_text)


def check_shared_memory(folder: Path) -> Finding:
    """Check the size of the shared memory, which is small in containers."""
    if not folder.is_dir():
        return problem(f"{folder} does not exist; mount a tmpfs there")
    usage = shutil.disk_usage(folder)
    usage_text = f"{folder}: {format_gib(usage.free)} free of {format_gib(usage.total)}"
    if usage.free < MIN_SHARED_MEMORY_BYTES:
        return problem(
            f"{usage_text}; the ranks need {format_gib(MIN_SHARED_MEMORY_BYTES, digits=3)}; remove stale files there, or start "
            "the container with more (--shm-size, shm_size, or an emptyDir with medium Memory)"
        )
    return ok(usage_text)


def check_devices(config: PipelineConfig, *, gpus: tuple[Gpu, ...]) -> Finding:
    """Compare the ranks of the config with the devices of this machine."""
    cluster = config.sharding.cluster
    if not isinstance(config.launcher, LocalLauncher):
        return not_used(f"training runs on hosts of {config.launcher.scheduler}, not on this machine")
    if cluster.device == "cpu" or (cluster.device == "auto" and not gpus):
        return ok(f"CPU, {cluster.processes_per_node or 2} ranks")
    num_ranks = cluster.processes_per_node or len(gpus)
    gpu_names = ", ".join(sorted({gpu.name for gpu in gpus}))
    if not gpus or num_ranks > len(gpus):
        return problem(
            f"sharding.cluster has device {cluster.device} and {num_ranks or 1} ranks, but torch can use {len(gpus)} GPUs"
            f"{f' ({gpu_names})' if gpu_names else ''}; check nvidia-smi, or set sharding.cluster.device or processes_per_node"
        )
    return ok(f"{len(gpus)} GPUs ({gpu_names}), {num_ranks} ranks")


def check_network(config: PipelineConfig) -> Finding:
    """Check that the network interfaces of the collectives exist on this machine."""
    launcher, address_by_interface = config.launcher, interface_addresses()
    interfaces_text = ", ".join(f"{interface} {address}" for interface, address in sorted(address_by_interface.items()))
    if isinstance(launcher, LocalLauncher):
        return ok(f"{LOOPBACK_INTERFACE} {address_by_interface.get(LOOPBACK_INTERFACE, '')}: all ranks are on this machine")
    environment = os.environ | launcher.env if launcher.scheduler in LOCAL_SCHEDULERS else launcher.env
    interface_by_setting = {
        f"launcher.env.{variable}": environment[variable] for variable in INTERFACE_VARIABLES if variable in environment
    }
    if launcher.interface_name is not None:
        interface_by_setting["launcher.interface"] = launcher.interface_name
    missing_interfaces = {
        setting: interface for setting, interface in interface_by_setting.items() if interface not in address_by_interface
    }
    if missing_interfaces:
        setting, interface = next(iter(missing_interfaces.items()))
        return problem(
            f"{setting} is {interface}, but this machine has {interfaces_text}; set it to an interface that every host has"
        )
    used_interfaces = ", ".join(sorted(set(interface_by_setting.values()))) or "the interface that leads to the first host"
    return ok(f"{used_interfaces}; this machine has {interfaces_text}")
