"""One torchrun: started in a session of its own, watched, and always ended.

A failed attempt is never restarted in place (torchrun's own restart is not to be relied on: pytorch/pytorch#135712,
#167288); the caller launches a new one from the last verified checkpoint.
"""

import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from recsys_core.errors import InputError, StageError
from recsys_core.parent import as_parent
from recsys_core.sharding.plan_file import PlanFile
from recsys_core.training.agent import FAILURES, Failure

logger = logging.getLogger(__name__)
POLL_S = 0.2
TERM_GRACE_S = 8.0
LAST_LINES = 12


class LaunchError(StageError):
    """The process group ended before its work was done; a new one may succeed from the last checkpoint."""


def launch(
    job: Path,
    *,
    plan: PlanFile,
    logs: Path,
    start_timeout_s: float,
    silence_timeout_s: float,
    alive: Path,
    poll: Callable[[], None] = lambda: None,
) -> None:
    """Runs `python -m recsys_core.training <job>` under torchrun with the ranks that `plan` wants; returns when all ended well.

    Args:
        job: JSON of a TrainJob or ExportJob.
        logs: new folder for each rank's stdout and stderr.
        alive: file that the ranks touch while they work: its modification time is their last sign of life.
        poll: called about five times a second.

    Raises:
        InputError: the plan needs more processes or hosts than there are, or a rank found its input wrong.
        StageError: a rank gave up for a reason of its own, such as a loss that is not finite.
        LaunchError: a rank failed or fell silent; names the first failing rank, its exit code or signal, its last lines.
    """
    check_capacity(plan)
    logs.mkdir(parents=True)
    environment = (
        os.environ
        | as_parent()
        | {
            "OMP_NUM_THREADS": str(max(1, len(psutil.Process().cpu_affinity() or [1]) // plan.processes_per_node)),
            "PYTHONUNBUFFERED": "1",
        }
    )
    command = [sys.executable, "-m", "recsys_core.training.agent", str(logs), str(plan.processes_per_node), str(job)]
    with (logs / "agent.log").open("wb") as output:
        agent = subprocess.Popen(
            command, start_new_session=True, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            _watch(agent, alive=alive, poll=poll, start_timeout_s=start_timeout_s, silence_timeout_s=silence_timeout_s)
        finally:
            _end(agent)
            poll()
    if agent.returncode != 0:
        raise _failure(logs, agent.returncode)


def check_capacity(plan: PlanFile) -> None:
    """InputError unless this host can start the processes that `plan` was made for."""
    if plan.nodes != 1:
        raise InputError(
            f"plan.json: made for {plan.nodes} hosts, but this launcher starts processes on one; "
            "set sharding.cluster.nodes to 1"
        )
    if plan.device == "cuda" and torch.cuda.device_count() < plan.processes_per_node:
        raise InputError(
            f"plan.json: wants {plan.processes_per_node} GPUs on this host, but there are {torch.cuda.device_count()}; "
            "set sharding.cluster.processes_per_node, or device to cpu"
        )


def _watch(
    agent: subprocess.Popen[bytes],
    *,
    alive: Path,
    poll: Callable[[], None],
    start_timeout_s: float,
    silence_timeout_s: float,
) -> None:
    started = time.time()
    while agent.poll() is None:
        poll()
        last = alive.stat().st_mtime if alive.is_file() else 0.0
        began = last > started  # else the file is an earlier attempt's
        limit, since = (silence_timeout_s, last) if began else (start_timeout_s, started)
        if time.time() - since > limit:
            _end(agent)
            what = f"no sign of life for {limit:g} s" if began else f"did not start within {limit:g} s"
            raise LaunchError(
                f"the ranks {what}; raise training.{'silence' if began else 'start'}_timeout_s if that is normal here",
            )
        time.sleep(POLL_S)


def _end(agent: subprocess.Popen[bytes]) -> None:
    """Ends whatever is left of the attempt: torchrun passes SIGTERM on; its ranks die with it on SIGKILL."""
    if agent.poll() is not None:
        return
    os.killpg(agent.pid, signal.SIGTERM)
    try:
        agent.wait(TERM_GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(agent.pid, signal.SIGKILL)
        agent.wait()


def _failure(logs: Path, code: int) -> InputError | StageError:
    if not (logs / FAILURES).is_file():
        how = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
        return LaunchError(f"torchrun ended with {how}\n{_tail(logs / 'agent.log')}")
    failure = Failure.model_validate_json((logs / FAILURES).read_bytes())
    how = f"signal {failure.signal}" if failure.signal else f"exit code {failure.exit_code}"
    # What a rank raised on purpose is a sentence for the user, and would be raised again by every new attempt.
    said = re.search(r"^recsys_core\.errors\.(InputError|StageError): (.*)", failure.traceback, re.MULTILINE | re.DOTALL)
    if said:
        return (InputError if said[1] == "InputError" else StageError)(said[2].strip())
    detail = failure.traceback or _tail(next(iter(sorted(logs.glob(f"**/{failure.rank}/stderr.log"))), logs / "agent.log"))
    return LaunchError(f"rank {failure.rank} was the first to fail, with {how}:\n{detail}\nlogs of all ranks: {logs}")


def _tail(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-LAST_LINES:])
