"""Config of the HTTP server: address, processes, batches of concurrent requests, and limits."""

import os
from typing import Annotated, Self

from pydantic import Field, model_validator

from recsys_core.config import OPERATIONAL, Settings
from recsys_core.units import MIB

MAX_PORT = 65_535
TOKEN_VARIABLE = "NIGHTJAR_SERVE_TOKEN"  # noqa: S105 a name
"""Environment variable with the token that requests must contain. Without the variable, requests need no token."""


class ServeConfig(Settings):
    """Settings of `nightjar serve`. The token is not a setting: it is in the environment variable NIGHTJAR_SERVE_TOKEN."""

    host: Annotated[str, OPERATIONAL] = Field(
        "127.0.0.1",
        min_length=1,
        max_length=255,
        pattern=r"^[A-Za-z0-9.:_-]+$",
        description="address on which the server listens. The default accepts connections from this machine only, and "
        "`0.0.0.0` accepts connections from everywhere",
    )
    port: Annotated[int, OPERATIONAL] = Field(
        8080, ge=0, le=MAX_PORT, description="port on which the server listens. With `0`, a free port is chosen and printed"
    )
    workers: Annotated[int | None, OPERATIONAL] = Field(
        None,
        ge=1,
        le=256,
        description="number of processes that answer requests. They share the memory of the index and of the other large "
        "files. Default: one per usable core",
    )
    threads: Annotated[int, OPERATIONAL] = Field(
        1, ge=1, le=256, description="number of threads of one search in each process, for requests with many rows"
    )
    poll_interval_s: Annotated[float, OPERATIONAL] = Field(
        10.0, ge=0.1, le=86_400, description="seconds between two requests to the registry for the version of the champion"
    )
    max_batch_rows: Annotated[int, OPERATIONAL] = Field(
        256, ge=1, le=100_000, description="largest number of rows of concurrent requests that are answered with one search"
    )
    max_wait_ms: Annotated[float, OPERATIONAL] = Field(
        0.0,
        ge=0,
        le=1_000,
        description="milliseconds for which a request waits for other requests, so that one search answers all of them. With "
        "`0`, one search answers the requests that arrived during the previous search",
    )
    max_queued_requests: Annotated[int, OPERATIONAL] = Field(
        512,
        ge=1,
        le=1_000_000,
        description="largest number of requests that wait in one process. A further request gets the status 503",
    )
    timeout_s: Annotated[float, OPERATIONAL] = Field(
        5.0, gt=0, le=3_600, description="time in seconds after which a request without an answer gets the status 504"
    )
    shutdown_timeout_s: Annotated[float, OPERATIONAL] = Field(
        10.0, gt=0, le=3_600, description="seconds for which open requests may continue after SIGTERM or Ctrl-C"
    )
    max_body_bytes: Annotated[int, OPERATIONAL] = Field(
        4 * MIB,
        ge=1_024,
        le=1_024 * MIB,
        description="largest size in bytes of a request's body. A larger body gets the status 413",
    )
    max_rows: Annotated[int, OPERATIONAL] = Field(
        1_000, ge=1, le=1_000_000, description="largest number of rows (users or items) of a request"
    )
    max_k: Annotated[int, OPERATIONAL] = Field(
        1_000, ge=1, le=1_000_000, description="largest `k` of a request. A request without `k` gets at most 10 items"
    )
    max_results: Annotated[int, OPERATIONAL] = Field(
        100_000, ge=1, le=100_000_000, description="largest number of rows times `k` of a request"
    )
    max_history: Annotated[int, OPERATIONAL] = Field(
        10_000, ge=1, le=10_000_000, description="largest number of items of one history in a request"
    )
    max_excluded: Annotated[int, OPERATIONAL] = Field(
        10_000, ge=1, le=10_000_000, description="largest number of items in the parameter `exclude` of a request"
    )

    @model_validator(mode="after")
    def _one_row_fits(self) -> Self:
        if self.max_results < self.max_k:
            raise ValueError(
                f"max_results is {self.max_results}, but one row may have max_k = {self.max_k} items; set "
                "max_results to at least max_k"
            )
        return self

    @property
    def num_workers(self) -> int:
        """Number of processes that answer requests."""
        return self.workers or len(os.sched_getaffinity(0))
