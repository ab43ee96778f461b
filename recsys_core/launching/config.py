"""Config of the launcher, which starts the processes of the stages `train` and `export`."""

import re
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from recsys_core.config import WEEK_S, FilePath, Name, Settings
from recsys_core.errors import redacted
from recsys_core.units import INT64_MAX

LOOPBACK_INTERFACE = "lo"
LOOPBACK_ADDRESS = "127.0.0.1"
LOCAL_SCHEDULERS = ("local_cwd",)
"""TorchX schedulers that start the agents as child processes on this host."""
CONTAINER_SCHEDULERS = ("kubernetes", "kubernetes_mcad", "aws_batch", "aws_sagemaker", "gcp_batch", "local_docker")
"""TorchX schedulers that start the agents in containers."""

SECRET_NAME_PATTERN = re.compile(r"(^|_)(PASSWORD|PASSWD|SECRET|TOKEN|KEY|AUTH)(_|$)", re.IGNORECASE)
"""Names of environment variables that hold a secret, such as AWS_SECRET_ACCESS_KEY."""

VariableName = Annotated[str, Field(max_length=200, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Text = Annotated[str, Field(max_length=30_000, pattern=r"^[^\x00]*$")]
Number = Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX)] | Annotated[float, Field(ge=-1e300, le=1e300)]
SchedulerSetting = Text | Number | bool


class LocalLauncher(Settings):
    """One torchrun on this host, which starts all ranks."""

    kind: Literal["local"] = Field("local", description="PyTorch's launcher torchrun starts all ranks on this host")
    rendezvous_timeout_s: float = Field(
        120.0, gt=0, le=WEEK_S, description="Longest time in seconds from the start of torchrun until all ranks run"
    )

    queue_timeout_s: ClassVar[float] = 0.0  # a local launch is never queued


class MountConfig(Settings):
    """Storage that the scheduler mounts in each container."""

    type: Literal["volume", "bind"] = Field(
        "volume", description="Kind of storage. `volume` is a volume claim of the cluster, and `bind` is a folder of the host"
    )
    src: FilePath = Field(description="Name of the volume claim, or path of the host's folder")
    dst: FilePath = Field(
        pattern="^/",
        description="Path at which the storage is mounted. The workspace and the data must have the same paths in the "
        "containers as on this host",
    )
    read_only: bool = Field(False, description="Mount the storage read-only. The storage with the workspace must be writable")


class TorchxLauncher(Settings):
    """One torchrun per host, submitted through TorchX. All hosts must mount the workspace and the data at the same paths."""

    kind: Literal["torchx"] = Field(
        "torchx", description="A TorchX scheduler, such as Slurm or Kubernetes, starts torchrun on each host"
    )
    scheduler: Name = Field(
        description="Name of the TorchX scheduler, such as `slurm`, `kubernetes`, `aws_batch` or `local_cwd`"
    )
    args: dict[Name, SchedulerSetting] = Field(
        default_factory=dict,
        max_length=100,
        description="Arguments of the scheduler, for example `partition` and `time`, or `namespace` and `queue`",
    )
    image: str = Field(
        "",
        max_length=1_000,
        pattern=r"^[!-~]*$",
        description="Container image with nightjar. Leave it empty if the hosts use this installation of nightjar",
    )
    python: FilePath | None = Field(
        None,
        description="Path of the Python interpreter on each host. Default: the interpreter of this process, or `python` if "
        "`launcher.image` is set",
    )
    cpus: int | None = Field(
        None,
        ge=1,
        le=100_000,
        description="Number of CPU cores that are requested for each host. Default: chosen by the scheduler",
    )
    memory_gb: float | None = Field(
        None,
        gt=0,
        le=1e6,
        description="Memory in GB that is requested for each host. Default: chosen by the scheduler",
    )
    mounts: tuple[MountConfig, ...] = Field(
        (), max_length=100, description="Storage for the scheduler to mount, if the hosts do not have it already"
    )
    env: dict[VariableName, Text] = Field(
        default_factory=dict,
        max_length=1_000,
        description="Environment variables that are set on each host, for example `NCCL_SOCKET_IFNAME`. Secrets are rejected",
    )
    interface: Name | None = Field(
        None,
        description="Network interface that connects the hosts, for example `ib0`. All users of the network must be trusted "
        "(see docs/security.md). Default: the interface that leads to the first host; `lo` with `local_cwd`",
    )
    rendezvous_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="Port on which the first host listens for the other hosts. With `0`, a free port is chosen",
    )
    queue_timeout_s: float = Field(
        3600.0, gt=0, le=8 * WEEK_S, description="Longest time in seconds that the job may wait in the scheduler's queue"
    )
    rendezvous_timeout_s: float = Field(
        300.0, gt=0, le=WEEK_S, description="Longest time in seconds from the start of the first host until all ranks run"
    )
    lease_timeout_s: float = Field(
        60.0,
        gt=5,
        le=WEEK_S,
        description="Time in seconds after which the hosts end their ranks if the launching process no longer runs",
    )

    @property
    def interface_name(self) -> str | None:
        """The configured interface; the loopback interface if the scheduler starts all agents on this host."""
        return self.interface or (LOOPBACK_INTERFACE if self.scheduler in LOCAL_SCHEDULERS else None)

    @model_validator(mode="after")
    def _reject_secrets(self) -> Self:
        for variable_name, variable_value in self.env.items():
            if SECRET_NAME_PATTERN.search(variable_name) or redacted(variable_value) != variable_value:
                raise ValueError(
                    f"env.{variable_name} is a secret, which every run would copy into its folder and MLflow; set it in the "
                    "environment of the hosts, for example with a secret of the scheduler"
                )
        return self

    @model_validator(mode="after")
    def _require_image(self) -> Self:
        if self.scheduler in CONTAINER_SCHEDULERS and not self.image:
            raise ValueError(
                f"scheduler is {self.scheduler}, which starts containers, but image is empty; "
                "set image to a container image with nightjar"
            )
        return self


Launcher = Annotated[LocalLauncher | TorchxLauncher, Field(discriminator="kind")]
