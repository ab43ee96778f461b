"""The registered versions: ask one."""

import mlflow
import pandas as pd

from flows.config import PipelineConfig
from recsys_core.config import Frozen
from recsys_core.errors import InputError
from tasks.model_uri import load_model
from tasks.registry import champion_uri
from tasks.tracking import connect


class RankedItem(Frozen):
    """One recommendation."""

    item_id: int | str
    score: float


class Answer(Frozen):
    """What `nightjar query` prints with --json."""

    model: str
    version: str
    items: tuple[RankedItem, ...]


def recommend(config: PipelineConfig, *, user: str, k: int, model_uri: str | None) -> Answer:
    """The top `k` of the champion, or of the version that `model_uri` names, for one user of the log."""
    client = connect(config.workspace)
    uri = model_uri or champion_uri(client, config.registry.model_name)
    mlflow.set_tracking_uri(client.tracking_uri)
    try:
        model = load_model(uri, client=client)
    except mlflow.exceptions.MlflowException as error:
        raise InputError(f"{uri}: cannot be loaded from {client.tracking_uri}: {error.message}") from error
    (answer,) = model.predict(pd.DataFrame({"user_id": [user]}), params={"k": k})
    if answer["error"] is not None:
        raise InputError(f"--user: {answer['error']}")
    items = tuple(RankedItem(item_id=i, score=s) for i, s in zip(answer["item_ids"], answer["scores"], strict=True))
    name, version = _name_and_version(uri, client)
    return Answer(model=name, version=version, items=items)


def _name_and_version(uri: str, client: mlflow.MlflowClient) -> tuple[str, str]:
    """models:/name/3 and models:/name@alias name a version; any other address stands for itself."""
    name, at, alias = uri.removeprefix("models:/").partition("@")
    if at:
        return name, str(client.get_model_version_by_alias(name, alias).version)
    name, _, version = name.rpartition("/")
    return name, version
