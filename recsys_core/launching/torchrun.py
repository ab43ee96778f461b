"""torchrun on one host, beside a thread that ends it when the launching process is gone and asks ranks where they are."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from recsys_core.launching.messages import LaunchFolder, Order, RankFailure, Unfit, last_lines
from recsys_core.launching.network import Meeting
from recsys_core.launching.rank import STACK_SIGNAL
from recsys_core.launching.rendezvous import INTERFACE_VARIABLES, across_hosts, on_one_host

POLL_S = 0.5
LOST_POLLS = 4
"""A lease that is gone this often in a row, or another's, is no hiccup of the file system: a resumed run has taken over."""
TERM_GRACE_S = 8.0


def run_ranks(order: Order, *, folder: LaunchFolder, node: int, host: str, meeting: Meeting) -> tuple[RankFailure, ...]:
    """Runs this host's ranks to their end; how each ended that did not end well. Raises Unfit if the hosts do not meet."""
    logs = folder.node(node)
    logs.mkdir()
    threading.Thread(target=_attend, args=(order, folder, node), daemon=True).start()
    try:
        with _rendezvous(order, node=node, meeting=meeting) as handler:
            config = LaunchConfig(
                min_nodes=order.num_nodes,
                max_nodes=order.num_nodes,
                nproc_per_node=order.processes_per_node,
                run_id=order.token,
                rdzv_backend=handler.get_backend(),
                rdzv_configs={"handler": handler},
                max_restarts=0,
                local_addr=meeting.address,
                logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=Std.ALL),
            )
            elastic_launch(config, sys.executable)("-u", "-m", order.module, str(order.job))
    except ChildFailedError as error:
        return tuple(_rank_failure(rank, one, logs=logs) for rank, one in error.failures.items())
    except DistError as error:
        if len(folder.ranks()) == order.world_size:
            first = folder.joined()[0].host
            raise Unfit(
                f"host {host} (node {node}) lost host {first} (node 0): an agent was killed, or a host is gone",
                retryable=True,
            ) from error
        where = f"{meeting.endpoint[0]}:{meeting.endpoint[1]}"
        raise Unfit(
            f"host {host} (node {node}) did not meet the others at {where}: {str(error).splitlines()[0]}; this host must "
            "reach that port (launcher.rendezvous_port) and address (launcher.interface), and hosts must reach each other on "
            "any port",
            retryable=True,
        ) from error
    return ()


@contextmanager
def _rendezvous(order: Order, *, node: int, meeting: Meeting) -> Iterator[RendezvousHandler]:
    if order.num_nodes == 1:
        with on_one_host(token=order.token, timeout_s=order.rendezvous_timeout_s) as handler:
            yield handler
        return
    os.environ.update({name: os.environ.get(name) or meeting.interface for name in INTERFACE_VARIABLES})
    yield across_hosts(
        meeting.endpoint,
        listener=meeting.listener,
        token=order.token,
        node=node,
        nodes=order.num_nodes,
        timeout_s=order.rendezvous_timeout_s,
    )


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
