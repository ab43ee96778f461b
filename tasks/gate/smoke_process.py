"""Process of the smoke test: `python -m tasks.gate.smoke_process` answers each request in a fork of itself.

A request is one line on stdin: a JSON object with model_folder and model_config (of a downloaded version), input_path,
output_path and k. The answer is one line on stdout: the exit code of the fork. The process does not import recsys_core, so a
version runs with its own logged code. It does not connect to MLflow, whose client takes a second to import.
"""

import ctypes
import gc
import json
import os
import signal
import sys
import time
from typing import Any

gc.disable()  # garbage collection takes a fifth of the time of the imports

# Every version needs these libraries. They are imported once, while the parent process prepares the first version.
import faiss  # noqa: E402, F401
import mlflow.pyfunc  # noqa: E402
import pandas as pd  # noqa: E402
import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
import torch  # noqa: E402, F401

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Answer requests until stdin is closed or the parent process ends."""
    _die_with_parent()
    for request_line in sys.stdin:
        fork_pid = os.fork()
        if fork_pid == 0:
            _die_with_parent()
            os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # stdout is for exit codes only
            answer(json.loads(request_line))
            return
        _, wait_status = os.waitpid(fork_pid, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(wait_status)}\n")
        sys.stdout.flush()


def _die_with_parent() -> None:
    """Make Linux kill this process when its parent ends, as in recsys_core.termination, which is not imported here."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def answer(request: dict[str, Any]) -> None:
    """Read user_id, history (item ids) and features from input_path; write item_ids and scores, a list per row, to output_path.

    A feature column is passed only if the signature of the version declares it. The metadata of the output schema has the CPU
    time of the recommendations.
    """
    sample_table = pq.read_table(request["input_path"])
    # Without suppress_warnings, MLflow compares the installed packages with the model's requirements, which takes 0.6 s.
    model = mlflow.pyfunc.load_model(request["model_folder"], model_config=request["model_config"], suppress_warnings=True)
    declared_names = model.metadata.get_input_schema().input_names()
    column_names = [name for name in sample_table.column_names if name in ("user_id", "history", *declared_names)]
    users = pd.DataFrame({name: pd.Series(sample_table[name].to_pylist(), dtype=object) for name in column_names})
    start_cpu_s = time.process_time()
    answers: Any = model.predict(users, params={"k": request["k"], "exclude_stored_history": False})
    cpu_s = time.process_time() - start_cpu_s
    item_type = sample_table.schema.field("history").type
    item_ids = pa.array([row_answer["item_ids"] for row_answer in answers], type=item_type)
    scores = pa.array([row_answer["scores"] for row_answer in answers], type=pa.list_(pa.float64()))
    answer_table = pa.table({"item_ids": item_ids, "scores": scores})
    pq.write_table(answer_table.replace_schema_metadata({"cpu_s": str(cpu_s)}), request["output_path"])


if __name__ == "__main__":
    main()
