"""Where the processes of the stages `train` and `export` are started."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from recsys_core.config import WEEK_S, FilePath, Name, Settings
from recsys_core.units import INT64_MAX

LOOPBACK = "lo"
LOCAL_SCHEDULERS = ("local_cwd",)
"""TorchX schedulers whose replicas are children of this process."""
CONTAINER_SCHEDULERS = ("kubernetes", "kubernetes_mcad", "aws_batch", "aws_sagemaker", "gcp_batch", "local_docker")

Variable = Annotated[str, Field(max_length=200, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Value = Annotated[str, Field(max_length=30_000, pattern=r"^[^\x00]*$")]
Number = Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX)] | Annotated[float, Field(ge=-1e300, le=1e300)]
Argument = Value | Number | bool


class LocalLauncher(Settings):
    """One torchrun on this host."""

    kind: Literal["local"] = "local"
    rendezvous_timeout_s: float = Field(120.0, gt=0, le=WEEK_S, description="until all ranks run")


class MountConfig(Settings):
    """Storage that the scheduler makes appear in each container."""

    type: Literal["volume", "bind"] = Field("volume", description="a volume claim of the cluster, or a folder of the host")
    src: FilePath = Field(description="name of the claim, or the host's folder")
    dst: FilePath = Field(pattern="^/", description="where it appears; workspace and data lie below it, as on this host")
    read_only: bool = Field(False, description="the one with the workspace must be writable")


class TorchxLauncher(Settings):
    """One torchrun per host, submitted through TorchX. Workspace and data have to lie on storage that all hosts mount alike."""

    kind: Literal["torchx"] = "torchx"
    scheduler: Name = Field(description="as TorchX names it: slurm, kubernetes, aws_batch, local_cwd")
    args: dict[Name, Argument] = Field(
        default_factory=dict,
        max_length=100,
        description="settings of the scheduler, such as partition and time, or namespace and queue",
    )
    image: str = Field(
        "",
        max_length=1_000,
        pattern=r"^[!-~]*$",
        description="container image with nightjar in it; empty where hosts share this installation",
    )
    python: FilePath | None = Field(
        None, description="the interpreter on each host; empty: this one's path, in an image `python`"
    )
    cpus: int | None = Field(None, ge=1, le=100_000, description="cores asked for per host; empty: the scheduler's default")
    memory_gb: float | None = Field(None, gt=0, le=1e6, description="memory asked for per host; empty: the scheduler's default")
    mounts: tuple[MountConfig, ...] = Field(
        (), max_length=100, description="storage to mount, where hosts do not have it of themselves"
    )
    env: dict[Variable, Value] = Field(
        default_factory=dict, max_length=1_000, description="environment of each host, such as NCCL_SOCKET_IFNAME"
    )
    interface: Name | None = Field(
        None,
        description="network interface by which hosts reach each other, such as ib0; it has to be a trusted network "
        "(docs/security.md); empty: the one that leads to the first host, with local_cwd lo",
    )
    rendezvous_port: int = Field(
        0, ge=0, le=65535, description="where the first host listens for the others; 0: any port that is free there"
    )
    queue_timeout_s: float = Field(3600.0, gt=0, le=8 * WEEK_S, description="how long the request may wait for hosts")
    rendezvous_timeout_s: float = Field(300.0, gt=0, le=WEEK_S, description="from the first host's start until all ranks run")
    lease_timeout_s: float = Field(
        60.0, gt=5, le=WEEK_S, description="hosts end by themselves when this process has been gone for so long"
    )

    @property
    def network(self) -> str | None:
        """The interface; that of the loopback where all hosts are this one."""
        return self.interface or (LOOPBACK if self.scheduler in LOCAL_SCHEDULERS else None)

    @model_validator(mode="after")
    def _has_image(self) -> Self:
        if self.scheduler in CONTAINER_SCHEDULERS and not self.image:
            raise ValueError(
                f"scheduler is {self.scheduler}, which starts containers, but image is empty; name one with nightjar"
            )
        return self


Launcher = Annotated[LocalLauncher | TorchxLauncher, Field(discriminator="kind")]
