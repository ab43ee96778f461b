"""A fake of the Slurm command line tools that TorchX calls; the tasks of a job are processes of this host.

Called as sbatch, srun, sacct, scancel or sinfo. The state of the jobs is in $FAKE_SLURM. As with Slurm, a job is not a child of
the process that submits it, and all tasks end when one fails.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

STATE = Path(os.environ.get("FAKE_SLURM", "."))


def sbatch(script: str) -> None:
    job = str(len(list(STATE.glob("*.state"))) + 100)
    (STATE / f"{job}.sh").write_text(Path(script).read_text())
    (STATE / f"{job}.state").write_text("PENDING")
    environment = os.environ | {"SLURM_JOB_ID": job, "SLURM_JOB_NODELIST_HET_GROUP_0": os.uname().nodename}
    with (STATE / f"{job}.out").open("wb") as output:
        batch = subprocess.Popen(
            ["bash", str(STATE / f"{job}.sh")], env=environment, stdout=output, stderr=output, start_new_session=True, cwd=STATE
        )
    (STATE / f"{job}.pid").write_text(str(batch.pid))
    sys.stdout.write(f"{job}\n")


def srun(*words: str) -> int:
    state = STATE / f"{os.environ['SLURM_JOB_ID']}.state"
    groups: list[list[str]] = [[]]
    for word in words:
        groups[-1].append(word) if word != ":" else groups.append([])
    tasks = []
    for group in groups:
        options = dict(word[2:].split("=", 1) for word in group if word.startswith("--"))
        first = next(index for index, word in enumerate(group) if not word.startswith("--"))
        exported = dict(pair.split("=", 1) for pair in options["export"].split(",")[1:])
        with Path(options["output"]).open("wb") as output, Path(options["error"]).open("wb") as error:
            tasks.append(subprocess.Popen(group[first:], env=os.environ | exported, stdout=output, stderr=error))
    state.write_text("RUNNING")
    while any(task.poll() is None for task in tasks):
        if any(task.poll() for task in tasks):
            for task in tasks:
                task.terminate()
        time.sleep(0.1)
    code = max(abs(task.returncode) for task in tasks)
    state.write_text("FAILED" if code else "COMPLETED")
    return code


def sacct(job: str) -> None:
    state = (STATE / f"{job}.state").read_text()
    tasks = (STATE / f"{job}.sh").read_text().count("#SBATCH --job-name")
    rows = "".join(f"{job}+{task}|nightjar-{task}|{state}\n" for task in range(tasks))
    sys.stdout.write(f"JobID|JobName|State\n{rows}")


def scancel(job: str) -> None:
    os.killpg(int((STATE / f"{job}.pid").read_text()), signal.SIGTERM)
    (STATE / f"{job}.state").write_text("CANCELLED")


def main() -> int:
    match Path(sys.argv[0]).name, sys.argv[1:]:
        case "sbatch", [*_, script]:
            sbatch(script)
        case "srun", words:
            return srun(*words)
        case "sacct", [*_, job]:
            sacct(job)
        case "scancel", [job]:
            scancel(job)
        case "sinfo", _:
            sys.stdout.write("PARTITION|MEMORY\ngpu|1024000\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
