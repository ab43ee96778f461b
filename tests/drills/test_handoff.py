"""A registered version answers in a new environment, into which pip installs its requirements: `make drills`."""

import json
import subprocess
import sys
from pathlib import Path

import mlflow
import pyarrow.parquet as pq
import pytest

from tests.drills.test_kill_and_resume import NIGHTJAR, write_config

pytestmark = pytest.mark.drill
MODEL_URI = "models:/nightjar@champion"
NUM_USERS = 5
INSTALL_TIMEOUT_S = 3_600.0
PREDICT_SCRIPT = """
import json, sys
import mlflow, pandas
mlflow.set_tracking_uri(sys.argv[1])
users = pandas.DataFrame({"user_id": json.loads(sys.argv[3])})
answers = mlflow.pyfunc.load_model(sys.argv[2]).predict(users, params={"k": 10})
print(json.dumps({"answers": answers, "loaded": sorted({"torchrec", "fbgemm_gpu", "prefect"} & sys.modules.keys())}))
"""


def test_a_version_answers_in_an_environment_that_has_only_its_requirements(tmp_path: Path) -> None:
    config_path = write_config(tmp_path)
    subprocess.run([*NIGHTJAR, "run", str(config_path)], check=True)
    (users_path,) = (tmp_path / "workspace" / "runs").glob("*/ingest_interactions/users.parquet")
    user_ids = pq.read_table(users_path, columns=["id"])["id"].to_pylist()[:NUM_USERS]
    expected_item_ids = []
    for user in user_ids:
        command = [*NIGHTJAR, "query", str(config_path), "--user", str(user), "-k", "10", "--json"]
        process = subprocess.run(command, capture_output=True, text=True, check=True)
        expected_item_ids.append([item["item_id"] for item in json.loads(process.stdout.splitlines()[-1])["items"]])

    tracking_uri = f"sqlite:///{tmp_path / 'workspace' / 'mlflow.db'}"
    mlflow.set_tracking_uri(tracking_uri)
    requirements_path = mlflow.pyfunc.get_model_dependencies(MODEL_URI)
    environment_folder = tmp_path / "other"
    subprocess.run([sys.executable, "-m", "venv", str(environment_folder)], check=True)
    subprocess.run(
        [str(environment_folder / "bin" / "pip"), "install", "-q", "-r", requirements_path],
        check=True,
        timeout=INSTALL_TIMEOUT_S,
    )
    process = subprocess.run(
        [str(environment_folder / "bin" / "python"), "-c", PREDICT_SCRIPT, tracking_uri, MODEL_URI, json.dumps(user_ids)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert process.returncode == 0, process.stderr
    answer = json.loads(process.stdout.splitlines()[-1])
    assert [row["item_ids"] for row in answer["answers"]] == expected_item_ids
    assert all(row["error"] is None for row in answer["answers"])
    assert answer["loaded"] == []
