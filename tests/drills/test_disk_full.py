"""The disk fills up in each stage, and under the databases of the embedded servers: `make drills`."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from flows.settings import yaml_loader
from recsys_core.disk import used_bytes
from recsys_core.manifests import STAGES, Manifest, StageName, read_unchecked_manifest
from tests.drills.interrupted_run import ROOT
from tests.drills.test_kill_and_resume import NIGHTJAR, RUN_ID, create_run_folder, write_config_with_every_stage

pytestmark = pytest.mark.drill
DISK_MIB = 96
TIMEOUT_S = 600.0
BOOKKEEPING_BYTES = 2**15
"""Disk space for the locks, the config and the record of a run."""
MIN_STARTED_STAGE_BYTES = 2**17
"""Size above which a stage starts and fills the disk. For a smaller stage, too little space is free for a start."""
FILES_WITH_TIMES = ("metrics.jsonl", "checkpoint/.metadata", "checkpoint/job.json", "checkpoint/manifest.json")
"""Files of the training that contain times or paths."""
RUN_STAGES_SCRIPT = """
import json, os, sys
from pathlib import Path
from flows.servers.prefect_server import embedded_server, prefect_session
from recsys_core.manifests import STAGES
from tests.drills.test_disk_full import RUN_ID, bytes_to_leave, fill, checksums_of

config_path, disk = Path(sys.argv[1]), Path(sys.argv[2])
os.environ["PREFECT_HOME"] = str(config_path.parent / "prefect")
os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{config_path.parent}/mlflow.db"

flow_path, log_file = "flows.scheduled.deployed:deployed_retrain", config_path.parent / "prefect.log"
with embedded_server() as server, prefect_session(server, flow_path, log_file=log_file) as flow:
    reference = config_path.parent / "workspace/runs" / RUN_ID
    run = disk / "workspace/runs" / RUN_ID
    state = flow(str(config_path), resume=RUN_ID, return_state=True)
    print(json.dumps({"state": state.name, "message": state.message}), flush=True)
    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{config_path.parent}/second.db"  # its artifacts are on the disk
    for stage, manifest_type in STAGES.items():
        arguments = {"overrides": (f"workspace={disk}/workspace",), "resume": RUN_ID, "until": stage}
        filler = fill(disk, bytes_left=bytes_to_leave(stage, reference))
        full_disk_state = flow(str(config_path), **arguments, return_state=True)
        folders = [name for name in (stage, f"{stage}.tmp") if (run / name).exists()]
        filler.unlink()
        state = flow(str(config_path), **arguments, return_state=True)
        answer = {"stage": stage, "full_disk_state": full_disk_state.name, "error": full_disk_state.message}
        answer |= {"folders": folders, "state": state.name, "message": state.message}
        answer["checksums"] = checksums_of(run / stage, manifest_type)
        answer["expected"] = checksums_of(reference / stage, manifest_type)
        print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount point of a file system with DISK_MIB of space."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def fill(disk: Path, *, bytes_left: int) -> Path:
    """Write one file that leaves `bytes_left` bytes of the disk free; return its path."""
    filler = disk / "filler"
    with filler.open("wb") as file:
        while (free := shutil.disk_usage(disk).free) > bytes_left:
            with suppress(OSError):  # another process has taken some of the space in the meantime
                os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, free - bytes_left)
    return filler


def bytes_to_leave(stage: StageName, run: Path) -> int:
    """Return a free space in which `stage` does not fit. run: folder of a complete run."""
    stage_bytes = used_bytes(run.parents[1] / "mlartifacts" if stage == "register" else run / stage)
    return BOOKKEEPING_BYTES + (stage_bytes // 2 if stage_bytes > MIN_STARTED_STAGE_BYTES else 0)


def checksums_of(folder: Path, manifest_type: type[Manifest]) -> dict[str, str]:
    """Return the sha256 of the stage's files.

    Files that contain times are left out, and also the parts of the coded log, whose rows DuckDB writes in any order.
    """
    manifest = read_unchecked_manifest(folder, manifest_type)
    files = {} if manifest is None else manifest.files
    return {name: record.sha256 for name, record in files.items() if not name.startswith(("parts/", *FILES_WITH_TIMES))}


def write_short_config(folder: Path) -> Path:
    """Write the config of a pipeline that trains one epoch on one rank."""
    config_path = write_config_with_every_stage(folder)
    config = yaml_loader.load(config_path.read_text(), subject="config")
    config["training"] |= {"epochs": 1}
    config["sharding"] = {"cluster": {"processes_per_node": 1}}
    config_path.write_text(yaml_loader.dump(config))
    return config_path


def environment_without_servers() -> dict[str, str]:
    """Return the environment without the addresses and settings of Prefect and MLflow servers."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}


def test_a_disk_that_is_full_in_any_stage_leaves_no_half_stage_and_a_resume_completes_the_run(
    tmp_path: Path, disk: Path
) -> None:
    config_path = write_short_config(tmp_path)
    for workspace in (tmp_path / "workspace", disk / "workspace"):
        create_run_folder(config_path, workspace=workspace)
    process = subprocess.run(
        [sys.executable, "-c", RUN_STAGES_SCRIPT, str(config_path), str(disk)],
        cwd=ROOT,
        env=environment_without_servers(),
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    reference, *answers = [json.loads(line) for line in process.stdout.splitlines()]
    assert reference["state"] == "Promoted", reference
    assert [answer["stage"] for answer in answers] == list(STAGES)
    for answer in answers:
        stage = answer["stage"]
        assert (answer["full_disk_state"], answer["folders"]) == ("Failed", []), answer
        assert f"{disk}" in answer["error"] and "GiB free; free some space" in answer["error"], answer
        assert answer["state"] == ("Promoted" if stage == "register" else "StoppedEarly"), answer
        if stage != "register":  # files of register contain the id of the MLflow run
            assert answer["checksums"] == answer["expected"] != {}, stage


def start_nightjar(config_path: Path, *arguments: str) -> "subprocess.Popen[str]":
    """Start `nightjar run` with the embedded servers."""
    return subprocess.Popen(
        [*NIGHTJAR, "run", str(config_path), *arguments],
        cwd=ROOT,
        env=environment_without_servers(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_disk_that_is_full_under_the_server_databases_ends_the_run_with_one_message(tmp_path: Path, disk: Path) -> None:
    config_path = write_short_config(tmp_path)
    workspace_option = f"--set=workspace={disk}/workspace"
    filler = fill(disk, bytes_left=2**20)
    _, error = (failed_run := start_nightjar(config_path, workspace_option)).communicate(timeout=TIMEOUT_S)
    assert failed_run.returncode == 2, error
    assert f"{disk}/workspace: the embedded Prefect server with its database takes at least 0.031 GiB" in error
    assert not list(disk.glob("workspace/runs/*"))
    filler.unlink()

    run = create_run_folder(config_path, workspace=disk / "workspace")
    interrupted_run = start_nightjar(config_path, workspace_option, "--resume", RUN_ID)
    deadline = time.monotonic() + TIMEOUT_S
    while not any((run / "train.work" / "checkpoints").glob("step-*[0-9]")):
        assert interrupted_run.poll() is None, interrupted_run.communicate()[1]
        assert time.monotonic() < deadline, "no checkpoint"
        time.sleep(0.01)
    filler = fill(disk, bytes_left=0)
    _, error = interrupted_run.communicate(timeout=TIMEOUT_S)
    assert interrupted_run.returncode == 2, error
    assert "GiB free; free some space" in error and "Traceback" not in error, error
    assert not (run / "train").exists()
    filler.unlink()

    output, error = (resumed_run := start_nightjar(config_path, workspace_option, "--resume", RUN_ID, "--json")).communicate(
        timeout=TIMEOUT_S
    )
    assert resumed_run.returncode == 0, error
    assert json.loads(output.splitlines()[-1])["model"]["alias"] == "champion"
