"""MLflow model that recommends items with the retriever, logged as code ("models from code") instead of a pickle."""

import functools
from pathlib import Path
from typing import Any

import pandas as pd
from mlflow.exceptions import MlflowException
from mlflow.models import set_model
from mlflow.pyfunc import PyFuncModel
from mlflow.pyfunc.model import PythonModel, PythonModelContext

from recsys_core.errors import InputError, StageError
from recsys_core.serving.requests import respond
from recsys_core.serving.retriever import Retriever


class NightjarModel(PythonModel):
    """Recommends items that are not in the user's history.

    A server responds with `{"predictions": [{"item_ids": [...], "scores": [...], "error": null, ...}]}`, one prediction per
    input row, in the same order. A row with an invalid value has an error message and empty lists.
    """

    rejects_unknown_params = True

    def load_context(self, context: PythonModelContext) -> None:
        """Load the package that was logged with the model; raise StageError if a file has changed since then."""
        config = context.model_config or {}
        sha256, version = config.get("package_sha256"), config.get("version")
        if not isinstance(sha256, str):
            raise StageError("MLmodel: the python_function flavor has no config package_sha256; download the version again")
        self.retriever = Retriever.load(Path(context.artifacts["package"]), sha256=sha256, version=version)

    def predict(
        self, context: PythonModelContext, model_input: pd.DataFrame, params: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """Recommend items for each row of `model_input`.

        Args:
            context: not used.
            model_input: optional columns user_id, history, and one per feature. A request for similar items has only the
                column item_id. A history is a list of item ids in time order, and replaces the user's history in the log. A
                missing value is null.
            params: see recsys_core.serving.requests. `filter` is a JSON object as a string. An invalid value fails the whole
                request.
        """
        inputs = {str(name): _values(model_input.iloc[:, index]) for index, name in enumerate(model_input.columns)}
        try:
            answers = respond(self.retriever, {"inputs": inputs, "params": params})
        except InputError as error:
            raise MlflowException.invalid_parameter_value(str(error)) from error
        has_vectors = bool(params and params.get("with_vectors"))
        return [row_answer.to_dict(with_vectors=has_vectors) for row_answer in answers]


def _values(column: pd.Series) -> list[Any]:
    """Return the values of a column, with None for null, which pandas stores as NaN, NA or NaT.

    A record without the column also has NaN, even in a column of lists.
    """
    return column.astype(object).mask(column.isna(), None).tolist()


def _reject_unknown_params() -> None:
    """Patch PyFuncModel.predict to reject params that are not in the signature of a NightjarModel.

    MLflow 3.17 drops unknown params with a warning before it calls the model's predict, and has no setting to change that.
    """
    predict = PyFuncModel.predict
    if hasattr(predict, "rejects_unknown_params"):  # already patched: MLflow runs this file each time it loads a model
        return

    @functools.wraps(predict)
    def predict_with_known_params(self: PyFuncModel, data: Any, params: dict[str, Any] | None = None) -> Any:
        model = getattr(self._model_impl, "python_model", None)
        if getattr(model, "rejects_unknown_params", False) and isinstance(params, dict):
            declared_params = [spec.name for spec in self.metadata.get_params_schema().params]
            if unknown_params := [str(param_name) for param_name in params if param_name not in declared_params]:
                raise MlflowException.invalid_parameter_value(
                    f"params: unknown {', '.join(unknown_params)}; the model has {declared_params}"
                )
        return predict(self, data, params=params)

    predict_with_known_params.rejects_unknown_params = True  # type: ignore[attr-defined]
    PyFuncModel.predict = predict_with_known_params  # type: ignore[method-assign]


_reject_unknown_params()
set_model(NightjarModel())
