"""Serving imports no library that only training, orchestration or tracking needs."""

import json
import subprocess
import sys

from recsys_core.serving.description import description_sha256
from recsys_core.serving.retriever import Retriever
from tests.recsys_core.serving.conftest import USER_FEATURES, USER_IDS, ModelBuilder

BLOCKED_MODULES = ("torchrec", "fbgemm_gpu", "prefect", "mlflow", "recsys_core.training")
SERVE_SCRIPT = """
import json, sys
from pathlib import Path

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name in sys.argv[4].split(","):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
from recsys_core.serving.retriever import Retriever

retriever = Retriever.load(Path(sys.argv[1]), sha256=sys.argv[2])
ids = retriever.recommend(json.loads(sys.argv[3]), k=10).item_ids
print(json.dumps([row.tolist() for row in ids]))
"""


def test_a_package_is_served_without_the_libraries_of_training_and_tracking(build_packaged_model: ModelBuilder) -> None:
    _, package = build_packaged_model(quantization="int8", learn_user_embedding=True, features=USER_FEATURES)
    folder, sha256 = package.folder / "package", description_sha256(package)
    command = [sys.executable, "-c", SERVE_SCRIPT, str(folder), sha256, json.dumps(USER_IDS), ",".join(BLOCKED_MODULES)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    expected_ids = Retriever.load(folder, sha256=sha256).recommend(USER_IDS, k=10).item_ids
    assert json.loads(result.stdout) == [item_ids.tolist() for item_ids in expected_ids]
