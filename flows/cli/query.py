"""`nightjar query`: recommendations of a registered version for one user."""

from typing import TYPE_CHECKING, Any, NamedTuple

import mlflow
import pandas as pd
from mlflow.pyfunc import PyFuncModel

from flows.settings.pipeline import PipelineConfig
from recsys_core.config import Frozen
from recsys_core.errors import InputError, NightjarError, StageError, redacted
from tasks.registry.mlflow_client import call_with_deadline, connect, tracking_error
from tasks.registry.model_uri import load_model
from tasks.registry.releases import champion_uri

if TYPE_CHECKING:
    from recsys_core.serving.retriever import Retriever


class RankedItem(Frozen):
    """A recommended item."""

    item_id: int | str
    score: float


class Answer(Frozen):
    """Result of `nightjar query`, printed by --json.

    Attributes:
        known_user: whether the user is in the vocabulary of the model; an unknown user gets the most popular items.
    """

    model: str
    version: str
    known_user: bool
    items: tuple[RankedItem, ...]


class LoadedVersion(NamedTuple):
    """A loaded model, with the name and number of its registered version."""

    model: PyFuncModel
    model_name: str
    version: str


def recommend(config: PipelineConfig, *, user: str, k: int, model_uri: str | None) -> Answer:
    """Return the top `k` items for a user from the champion, or from the version at `model_uri`."""
    model, model_name, version = load_version(config, model_uri)
    predictions: Any = model.predict(pd.DataFrame({"user_id": [user]}), params={"k": k})
    (prediction,) = predictions
    if prediction["error"] is not None:
        raise InputError(f"--user: {prediction['error']}")
    known_user = bool(model.unwrap_python_model().retriever.is_known([user])[0])
    items = tuple(
        RankedItem(item_id=item_id, score=score)
        for item_id, score in zip(prediction["item_ids"], prediction["scores"], strict=True)
    )
    return Answer(model=model_name, version=version, known_user=known_user, items=items)


def load_retriever(config: PipelineConfig, model_uri: str | None = None) -> "Retriever":
    """Load the champion, or the version at `model_uri` such as models:/nightjar/3, as a Retriever."""
    retriever: Retriever = load_version(config, model_uri).model.unwrap_python_model().retriever
    return retriever


def load_version(config: PipelineConfig, model_uri: str | None) -> LoadedVersion:
    """Load the champion, or the version at `model_uri`, from the MLflow of the config and verify its package."""
    client = connect(config.workspace)
    redacted_uri = redacted(client.tracking_uri)
    version_uri, model_name, version = call_with_deadline(
        lambda: _resolve_version(model_uri or champion_uri(client, config.registry.model_name), client),
        uri=client.tracking_uri,
    )
    mlflow.set_tracking_uri(client.tracking_uri)
    try:
        model = load_model(version_uri, client=client, workspace=config.workspace)
    except mlflow.exceptions.MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            raise InputError(f"{version_uri}: cannot be loaded from {redacted_uri}: {redacted(error.message)}") from None
        raise tracking_error(error, uri=client.tracking_uri) from None
    except NightjarError:
        raise
    except Exception as error:  # any error of a damaged model
        raise StageError(
            redacted(f"{version_uri}: cannot be loaded from {redacted_uri}: {type(error).__name__}: {error}")
        ) from None
    return LoadedVersion(model, model_name, version)


def _resolve_version(model_uri: str, client: mlflow.MlflowClient) -> tuple[str, str, str]:
    """Return the URI with the version number in place of an alias, the name and the version."""
    model_name, separator, alias = model_uri.removeprefix("models:/").partition("@")
    if not separator:
        model_name, _, version = model_name.rpartition("/")
        return model_uri, model_name, version
    try:
        version = str(client.get_model_version_by_alias(model_name, alias).version)
    except mlflow.exceptions.MlflowException as error:
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise
        raise InputError(f"{model_uri}: no such alias in {redacted(client.tracking_uri)}: {redacted(error.message)}") from None
    return f"models:/{model_name}/{version}", model_name, version
