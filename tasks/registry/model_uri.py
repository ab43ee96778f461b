"""Registered versions loaded by URI, with the package that was registered.

It imports recsys_core only for an error: a version runs the code that it was logged with where no other is loaded yet.
"""

import mlflow.pyfunc
from mlflow import MlflowClient
from mlflow.pyfunc import PyFuncModel
from mlflow.store.artifact.utils.models import get_model_name_and_version

PACKAGE_SHA256_TAG = "nightjar.package_sha256"
PACKAGE_SHA256 = "package_sha256"
"""Key of the model config, in MLmodel, with the sha256 of package.json."""


def load_model(uri: str, *, client: MlflowClient) -> PyFuncModel:
    """The model at `uri`; one that names a version is compared with the sha256 in the version's tag, not with MLmodel's.

    Raises StageError for a version without the tag, or whose package was changed.
    """
    uri, config = resolve(uri, client=client)
    return mlflow.pyfunc.load_model(uri, model_config=config)


def resolve(uri: str, *, client: MlflowClient) -> tuple[str, dict[str, str] | None]:
    """The URI of the version itself, since an alias may move, and the model config with the sha256 of the version's tag.

    A run, a folder or a logged model keeps its URI and has no config: its MLmodel holds the sha256.
    """
    named: tuple[str, ...] = get_model_name_and_version(client, uri) if uri.startswith("models:/") else ()
    if len(named) != 2:
        return uri, None
    name, number = named
    sha256 = client.get_model_version(name, number).tags.get(PACKAGE_SHA256_TAG)
    if sha256 is None:
        from recsys_core.errors import StageError

        raise StageError(
            f"models:/{name}/{number} has no tag {PACKAGE_SHA256_TAG}, so its package cannot be verified; register the model "
            "again, and remove the version's alias if it has one"
        )
    return f"models:/{name}/{number}", {PACKAGE_SHA256: sha256}
