"""A fake of the Slurm tools that TorchX calls. The tasks of a job are processes of this machine.

The script is called as sbatch, srun, sacct, scancel or sinfo. The folder $FAKE_SLURM contains the files of the jobs. As with
Slurm, a job is not a child of the process that submits it, and all tasks end when one task fails.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

STATE_FOLDER = Path(os.environ.get("FAKE_SLURM", "."))


def sbatch(script_path: str) -> None:
    """Start a batch script in the background, and print its job id."""
    job_id = str(len(list(STATE_FOLDER.glob("*.state"))) + 100)
    (STATE_FOLDER / f"{job_id}.sh").write_text(Path(script_path).read_text())
    (STATE_FOLDER / f"{job_id}.state").write_text("PENDING")
    environment = os.environ | {"SLURM_JOB_ID": job_id, "SLURM_JOB_NODELIST_HET_GROUP_0": os.uname().nodename}
    with (STATE_FOLDER / f"{job_id}.out").open("wb") as output_file:
        process = subprocess.Popen(
            ["bash", str(STATE_FOLDER / f"{job_id}.sh")],
            env=environment,
            stdout=output_file,
            stderr=output_file,
            start_new_session=True,
            cwd=STATE_FOLDER,
        )
    (STATE_FOLDER / f"{job_id}.pid").write_text(str(process.pid))
    sys.stdout.write(f"{job_id}\n")


def srun(*arguments: str) -> int:
    """Execute the tasks of a job, and end all tasks if one of them fails."""
    state_path = STATE_FOLDER / f"{os.environ['SLURM_JOB_ID']}.state"
    arguments_by_task: list[list[str]] = [[]]
    for argument in arguments:
        if argument == ":":
            arguments_by_task.append([])
        else:
            arguments_by_task[-1].append(argument)
    task_processes = []
    for task_arguments in arguments_by_task:
        options = dict(argument[2:].split("=", 1) for argument in task_arguments if argument.startswith("--"))
        command_index = next(index for index, argument in enumerate(task_arguments) if not argument.startswith("--"))
        command = task_arguments[command_index:]
        environment = os.environ | dict(assignment.split("=", 1) for assignment in options["export"].split(",")[1:])
        with Path(options["output"]).open("wb") as output_file, Path(options["error"]).open("wb") as error_file:
            task_processes.append(subprocess.Popen(command, env=environment, stdout=output_file, stderr=error_file))
    state_path.write_text("RUNNING")
    while any(process.poll() is None for process in task_processes):
        if any(process.poll() for process in task_processes):
            for process in task_processes:
                process.terminate()
        time.sleep(0.1)
    exit_code = max(abs(process.returncode) for process in task_processes)
    state_path.write_text("FAILED" if exit_code else "COMPLETED")
    return exit_code


def sacct(job_id: str) -> None:
    """Print the state of a job and its tasks."""
    job_state = (STATE_FOLDER / f"{job_id}.state").read_text()
    num_tasks = (STATE_FOLDER / f"{job_id}.sh").read_text().count("#SBATCH --job-name")
    task_lines = "".join(f"{job_id}+{task}|nightjar-{task}|{job_state}\n" for task in range(num_tasks))
    sys.stdout.write(f"JobID|JobName|State\n{task_lines}")


def scancel(job_id: str) -> None:
    os.killpg(int((STATE_FOLDER / f"{job_id}.pid").read_text()), signal.SIGTERM)
    (STATE_FOLDER / f"{job_id}.state").write_text("CANCELLED")


def main() -> int:
    match Path(sys.argv[0]).name, sys.argv[1:]:
        case "sbatch", [*_, script_path]:
            sbatch(script_path)
        case "srun", arguments:
            return srun(*arguments)
        case "sacct", [*_, job_id]:
            sacct(job_id)
        case "scancel", [job_id]:
            scancel(job_id)
        case "sinfo", _:
            sys.stdout.write("PARTITION|MEMORY\ngpu|1024000\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
