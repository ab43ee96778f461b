"""Serving without the libraries that only training, orchestration or tracking needs."""

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

folder, sha256, user_ids, blocked_modules = sys.argv[1:]

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name in blocked_modules.split(","):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
from recsys_core.serving.retriever import Retriever

retriever = Retriever.load(Path(folder), sha256=sha256)
assert "torch" in sys.modules and "torch._dynamo" not in sys.modules
ids_of_users = retriever.recommend(json.loads(user_ids), k=10).item_ids
print(json.dumps([item_ids.tolist() for item_ids in ids_of_users]))
"""


def test_a_package_is_served_without_the_compiler_of_torch_and_the_libraries_of_training_and_tracking(
    build_packaged_model: ModelBuilder,
) -> None:
    _, package = build_packaged_model(quantization="int8", learn_user_embedding=True, features=USER_FEATURES)
    folder, sha256 = package.folder / "package", description_sha256(package)
    command = [sys.executable, "-c", SERVE_SCRIPT, str(folder), sha256, json.dumps(USER_IDS), ",".join(BLOCKED_MODULES)]
    serving_process = subprocess.run(command, capture_output=True, text=True)
    assert serving_process.returncode == 0, serving_process.stderr
    expected_ids = Retriever.load(folder, sha256=sha256).recommend(USER_IDS, k=10).item_ids
    assert json.loads(serving_process.stdout) == [item_ids.tolist() for item_ids in expected_ids]
