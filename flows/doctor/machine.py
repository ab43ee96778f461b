"""Checks of this machine for `nightjar doctor FILE`: shared memory, devices and network interfaces."""

import os
import shutil
from pathlib import Path

from flows.config import PipelineConfig
from flows.doctor.finding import Finding, not_used, ok, problem
from recsys_core.launching.config import LOCAL_SCHEDULERS, LOOPBACK_INTERFACE, LocalLauncher
from recsys_core.launching.network import interface_addresses
from recsys_core.preflight import Gpu
from recsys_core.units import MIB, format_gib

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 the mount point is a convention of Linux
MIN_SHARED_MEMORY_BYTES = 128 * MIB
"""Twice the default of container engines. With the default size, NCCL fails to start."""
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


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
