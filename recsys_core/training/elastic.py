"""torchrun on one host, beside a thread that ends it when the launching process is gone and asks ranks where they are."""

import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.run import parse_args, run

from recsys_core.training.launch_folder import LaunchFolder, Order, RankFailure, Unfit, last_lines
from recsys_core.training.rank import STACK_SIGNAL

POLL_S = 0.5
LOST_POLLS = 4
"""A lease that is gone this often in a row, or another's, is no hiccup of the file system: a resumed run has taken over."""
TERM_GRACE_S = 8.0
CONNECT_TIMEOUT_S = 60.0


def run_ranks(
    order: Order, *, folder: LaunchFolder, node: int, host: str, endpoint: str, address: str
) -> tuple[RankFailure, ...]:
    """Runs this host's ranks to their end; how each ended that did not end well. Raises Unfit if the hosts do not meet."""
    logs = folder.node(node)
    logs.mkdir()
    configured = {
        "is_host": str(node == 0).lower(),
        "join_timeout": max(1, int(order.rendezvous_timeout_s)),
        "read_timeout": max(1, int(min(CONNECT_TIMEOUT_S, order.rendezvous_timeout_s))),
    }
    arguments = parse_args(  # type: ignore[no-untyped-call]
        [
            *("--nnodes", str(order.nodes), "--nproc-per-node", str(order.processes_per_node), "--max-restarts", "0"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", order.token),
            *("--rdzv-conf", ",".join(f"{name}={value}" for name, value in configured.items())),
            *("--local-addr", address, "--log-dir", str(logs), "--redirects", "3"),
            *("--module", order.module, str(order.job)),
        ]
    )
    threading.Thread(target=_attend, args=(order, folder, node), daemon=True).start()
    try:
        run(arguments)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        return tuple(_rank_failure(rank, one, logs=logs) for rank, one in error.failures.items())
    except RendezvousError as error:
        if len(folder.ranks()) == order.world_size:
            first = folder.joined()[0].host
            raise Unfit(
                f"host {host} (node {node}) lost host {first} (node 0): an agent was killed, or a host is gone",
                retryable=True,
            ) from error
        raise Unfit(
            f"host {host} (node {node}) did not meet the others at {endpoint}: {error.__cause__ or error}; this host must "
            "reach that port (launcher.rendezvous_port) and name, and hosts must reach each other on any port",
            retryable=True,
        ) from error
    return ()


def _rank_failure(rank: int, ended: ProcessFailure, *, logs: Path) -> RankFailure:
    stderr = next(iter(sorted(logs.glob(f"**/{ended.local_rank}/stderr.log"))), None)
    return RankFailure(
        rank=rank,
        exit_code=ended.exitcode,
        signal=signal.Signals(-ended.exitcode).name if ended.exitcode < 0 else None,
        traceback=_traceback(ended.error_file_data),
        last_lines="" if stderr is None else last_lines(stderr),
        timestamp=ended.timestamp,
    )


def _traceback(reply: Mapping[str, Any]) -> str:
    """The callstack that @record left in the rank's error file; empty when a signal gave it no time to."""
    message = reply.get("message")
    return str(message["extraInfo"]["py_callstack"]) if isinstance(message, dict) else ""


def _attend(order: Order, folder: LaunchFolder, node: int) -> None:
    """Until the agent ends: passes on the question where the ranks are, and ends all when the lease is no longer renewed."""
    asked, value, renewed, lost = False, None, time.monotonic(), 0
    while True:
        time.sleep(POLL_S)
        if not asked and folder.stacks.exists():
            asked = True
            for started in folder.ranks().values():  # the others have not said yet that they can be asked
                if started.node == node and psutil.pid_exists(started.pid):
                    os.kill(started.pid, STACK_SIGNAL)
        if order.lease_timeout_s is None:
            continue
        # Compared with what it was, by this host's own clock: clocks of hosts differ.
        now = folder.lease_of(order.token)
        lost = lost + 1 if now is None else 0
        if now != value:
            value, renewed = now, time.monotonic()
        if time.monotonic() - renewed > order.lease_timeout_s or lost >= LOST_POLLS:
            _end_all()


def _end_all() -> None:
    """Of what runs on this host: torchrun passes SIGTERM on to its ranks; those that outlive it die with it."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(TERM_GRACE_S)
    os._exit(1)
