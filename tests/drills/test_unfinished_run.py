"""On a real Prefect server, a scheduled run resumes an unfinished run or starts a new run: `make drills`."""

import subprocess
import sys
from pathlib import Path

import pytest

from flows.settings.config_file import load_config
from tests.drills.interrupted_run import ROOT
from tests.flows.runs.test_before_run_scheduled import add_run

pytestmark = pytest.mark.drill
RUN_SCRIPT = """
import logging, os, sys
from pathlib import Path
from flows.servers.prefect_server import embedded_server, prefect_session
config_path = Path(sys.argv[1])
os.environ["PREFECT_HOME"] = str(config_path.parent / "prefect")
logging.basicConfig(level=logging.WARNING)
flow_path, log_file = "flows.scheduled.deployed:deployed_retrain", config_path.parent / "prefect.log"
with embedded_server() as server, prefect_session(server, flow_path, log_file=log_file) as deployed_retrain:
    from prefect import tags
    with tags(*sys.argv[2:]):
        print(deployed_retrain(str(config_path), return_state=True).message)
"""


@pytest.mark.parametrize("is_scheduled", [True, False])
def test_a_scheduled_run_resumes_the_unfinished_run_and_a_manual_run_does_not(tmp_path: Path, is_scheduled: bool) -> None:
    config_path = tmp_path / "nightly.yaml"
    config_path.write_text(
        "name: p\nworkspace: .\ninteractions: {paths: log.parquet, timestamp_column: t}\nschedule: {unfinished_run: resume}\n"
    )
    add_run(load_config(config_path, ()), "20261121-070312-ab12")
    arguments = [str(config_path)] + ["auto-scheduled"] * is_scheduled
    process = subprocess.run([sys.executable, "-c", RUN_SCRIPT, *arguments], capture_output=True, text=True, cwd=ROOT)
    assert "log.parquet" in process.stdout, process.stderr  # either run fails, because its input is missing
    assert ("run 20261121-070312-ab12 is unfinished" in process.stderr) == is_scheduled
    assert ("it is resumed" in process.stderr) == is_scheduled
