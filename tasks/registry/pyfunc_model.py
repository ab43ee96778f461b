"""The model's code as MLflow stores and runs it (models from code): raw ids in, raw ids out, nothing pickled."""

import functools
from pathlib import Path
from typing import Any

import pandas as pd
from mlflow.exceptions import MlflowException
from mlflow.models import set_model
from mlflow.pyfunc import PyFuncModel
from mlflow.pyfunc.model import PythonModel, PythonModelContext

from recsys_core.errors import InputError, StageError
from recsys_core.serving.retriever import Retriever


class NightjarModel(PythonModel):
    """Recommends items the user has not had.

    Served, it answers `{"predictions": [{"item_ids": [...], "scores": [...], "error": null}]}`, one entry per row in the order
    of the rows. A row whose user_id or history cannot be read has an error in words and empty lists.
    """

    refuses_unknown_params = True

    def load_context(self, context: PythonModelContext) -> None:
        """Loads the package that was logged with the model; StageError with the name of a file that was changed since."""
        sha256 = (context.model_config or {}).get("package_sha256")
        if not isinstance(sha256, str):
            raise StageError("MLmodel: the python_function flavor has no config package_sha256; download the version again")
        self.retriever = Retriever.load(Path(context.artifacts["package"]), sha256=sha256)

    def predict(
        self, context: PythonModelContext, model_input: pd.DataFrame, params: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """`user_id` per row, optionally `history`: item ids in time order, instead of the user's own log; null keeps the log.

        params: k, and exclude_log (Retriever.recommend says what they do). A param with a wrong value fails the request.
        """
        asked = {"k": 10, "exclude_log": True} | (params or {})
        histories = model_input["history"].tolist() if "history" in model_input else None
        try:
            if empty := [name for name, value in asked.items() if value is None]:
                raise InputError(f"params: {empty[0]} is null; give it a value, or leave it out")
            answers = self.retriever.answer(model_input["user_id"].tolist(), histories=histories, **asked)
        except InputError as error:
            raise MlflowException.invalid_parameter_value(str(error)) from error
        return [
            {"item_ids": answer.item_ids.tolist(), "scores": answer.scores.tolist(), "error": answer.error}
            for answer in answers
        ]


def _refuse_unknown_params() -> None:
    """Makes PyFuncModel.predict refuse params that the signature of a NightjarModel does not declare.

    MLflow 3.17 drops them with a warning before it calls the model's own predict, and has no setting for it.
    """
    predict = PyFuncModel.predict
    if hasattr(predict, "refuses_unknown_params"):  # MLflow runs this file at every load
        return

    @functools.wraps(predict)
    def checked(self: PyFuncModel, data: Any, params: dict[str, Any] | None = None) -> Any:
        model = getattr(self._model_impl, "python_model", None)
        if getattr(model, "refuses_unknown_params", False) and isinstance(params, dict):
            declared = [spec.name for spec in self.metadata.get_params_schema().params]
            if unknown := [str(name) for name in params if name not in declared]:
                raise MlflowException.invalid_parameter_value(f"params: unknown {', '.join(unknown)}; the model has {declared}")
        return predict(self, data, params=params)

    checked.refuses_unknown_params = True  # type: ignore[attr-defined]
    PyFuncModel.predict = checked  # type: ignore[method-assign]


_refuse_unknown_params()
set_model(NightjarModel())
