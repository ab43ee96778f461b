"""Serving imports no library that only training, orchestration or tracking needs."""

import json
import subprocess
import sys

from recsys_core.serving.description import description_sha256
from recsys_core.serving.retriever import Retriever
from tests.recsys_core.serving.conftest import USER_FEATURES, USER_IDS, Build

BLOCKED_MODULES = ("torchrec", "fbgemm_gpu", "prefect", "mlflow", "recsys_core.training")
SERVE = """
import json, sys
from pathlib import Path

class Block:
    def find_spec(self, name, path=None, target=None):
        if name in sys.argv[4].split(","):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Block())
from recsys_core.serving.retriever import Retriever

retriever = Retriever.load(Path(sys.argv[1]), sha256=sys.argv[2])
ids = retriever.recommend(json.loads(sys.argv[3]), k=10).item_ids
print(json.dumps([row.tolist() for row in ids]))
"""


def test_a_package_is_served_without_torchrec_and_fbgemm(build: Build) -> None:
    _, package = build(quantization="int8", learn_user_embedding=True, features=USER_FEATURES)
    folder, sha256 = package.folder / "package", description_sha256(package)
    command = [sys.executable, "-c", SERVE, str(folder), sha256, json.dumps(USER_IDS), ",".join(BLOCKED_MODULES)]
    served = subprocess.run(command, capture_output=True, text=True)
    assert served.returncode == 0, served.stderr
    here = Retriever.load(folder, sha256=sha256).recommend(USER_IDS, k=10).item_ids
    assert json.loads(served.stdout) == [row.tolist() for row in here]
