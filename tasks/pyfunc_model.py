"""The model's code as MLflow stores and runs it (models from code): raw ids in, raw ids out, nothing pickled."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from mlflow.models import set_model
from mlflow.pyfunc.model import PythonModel, PythonModelContext

from recsys_core.serving.retriever import Retriever


class NightjarModel(PythonModel):
    """Recommends items the user has not had. Served, it answers `{"predictions": [{"item_ids": [...], "scores": [...]}]}`."""

    def load_context(self, context: PythonModelContext) -> None:
        """Loads the package that was logged with the model."""
        self.retriever = Retriever.load(Path(context.artifacts["package"]))

    def predict(
        self, context: PythonModelContext, model_input: pd.DataFrame, params: dict[str, Any] | None = None
    ) -> list[dict[str, list[Any]]]:
        """`user_id` per row, optionally `history` (item ids in time order, instead of the user's own log).

        params: k, and exclude_log (Retriever.recommend says what they do).
        """
        asked = {"k": 10, "exclude_log": True} | (params or {})
        histories = [_history(given) for given in model_input["history"]] if "history" in model_input else None
        item_ids, scores = self.retriever.recommend(model_input["user_id"].tolist(), histories=histories, **asked)
        return [
            {"item_ids": np.asarray(ids).tolist(), "scores": np.asarray(row, dtype=np.float64).tolist()}
            for ids, row in zip(item_ids, scores, strict=True)
        ]


def _history(given: Any) -> list[Any] | None:
    return None if given is None else list(given)


set_model(NightjarModel())
