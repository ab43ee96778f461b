"""Subprocess of the smoke test: `python -m tasks.gate.smoke_process MODEL_URI INPUT OUTPUT --k K --workspace FOLDER`.

The subprocess does not import recsys_core, so a model version runs with the code that was logged with the version.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import mlflow.pyfunc
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from mlflow import MlflowClient

from tasks.registry.model_uri import fetch_model

EXIT_NOT_FETCHED = 3
"""Exit code if the version could not be downloaded from MLflow; any other failure exits with 1."""


def main() -> None:
    """Read user_id and history (item ids) from INPUT; write item_ids and scores, one list per input row, to OUTPUT."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model_uri")
    parser.add_argument("input_path", type=Path)
    parser.add_argument("output_path", type=Path)
    parser.add_argument("--k", type=int, required=True)
    parser.add_argument("--workspace", type=Path, required=True)
    arguments = parser.parse_args()
    sample_table = pq.read_table(arguments.input_path)
    requests = pd.DataFrame({"user_id": sample_table["user_id"].to_pylist(), "history": sample_table["history"].to_pylist()})
    try:
        model_folder, model_config = fetch_model(arguments.model_uri, client=MlflowClient(), workspace=arguments.workspace)
    except Exception as error:  # any error of MLflow, the artifact store or the network
        # The parent reports the last line of stderr as the reason.
        print(f"{type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
        # StageError: the model is not the one that was registered. recsys_core is not imported, so the name is compared.
        sys.exit(1 if type(error).__name__ == "StageError" else EXIT_NOT_FETCHED)
    model = mlflow.pyfunc.load_model(str(model_folder), model_config=model_config)
    answers: Any = model.predict(requests, params={"k": arguments.k, "exclude_stored_history": False})
    item_type = sample_table.schema.field("history").type
    item_ids = pa.array([answer["item_ids"] for answer in answers], type=item_type)
    scores = pa.array([answer["scores"] for answer in answers], type=pa.list_(pa.float64()))
    pq.write_table(pa.table({"item_ids": item_ids, "scores": scores}), arguments.output_path)


if __name__ == "__main__":
    main()
