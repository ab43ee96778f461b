"""`python -m tasks.registry.smoke_process MODEL_URI CASES ANSWERS`: query a version in a process with nothing else loaded.

It imports no recsys_core of its own, so that what answers is the code that was logged with the version.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import mlflow.artifacts
import mlflow.pyfunc
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from mlflow import MlflowClient

from tasks.registry.model_uri import resolve

NOT_FETCHED = 3
"""Exit code where the version's files could not be read from MLflow; any other failure is 1."""


def main() -> None:
    """CASES: parquet with user_id and history (list of item ids); ANSWERS gets item_ids and scores (lists), row by row."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model_uri")
    parser.add_argument("cases", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--k", type=int, required=True)
    arguments = parser.parse_args()
    cases = pq.read_table(arguments.cases)
    questions = pd.DataFrame({"user_id": cases["user_id"].to_pylist(), "history": cases["history"].to_pylist()})
    try:
        uri, config = resolve(arguments.model_uri, client=MlflowClient())
        folder = mlflow.artifacts.download_artifacts(uri)
    except Exception as error:  # whatever MLflow, an artifact store or the network raises
        print(f"{type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201  the last line is the reason
        sys.exit(NOT_FETCHED)
    model = mlflow.pyfunc.load_model(folder, model_config=config)
    answers: Any = model.predict(questions, params={"k": arguments.k, "exclude_log": False})
    item_type = cases.schema.field("history").type
    item_ids = pa.array([answer["item_ids"] for answer in answers], type=item_type)
    scores = pa.array([answer["scores"] for answer in answers], type=pa.list_(pa.float64()))
    pq.write_table(pa.table({"item_ids": item_ids, "scores": scores}), arguments.answers)


if __name__ == "__main__":
    main()
