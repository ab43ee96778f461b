"""Model URIs of MLflow: loading a registered version and verifying its package.

The module imports recsys_core only to raise an error: a version must run with the copy of recsys_core that was logged with it.
"""

import mlflow.pyfunc
from mlflow import MlflowClient
from mlflow.pyfunc import PyFuncModel
from mlflow.store.artifact.utils.models import get_model_name_and_version

PACKAGE_SHA256_TAG = "nightjar.package_sha256"
PACKAGE_SHA256_KEY = "package_sha256"
"""Key of the model config in MLmodel that holds the sha256 of package.json."""


def load_model(uri: str, *, client: MlflowClient) -> PyFuncModel:
    """Load the model at `uri`. The package of a registered version must have the sha256 in the version's tag.

    Raises:
        StageError: the version does not have the tag, or its package was changed.
    """
    uri, model_config = uri_and_model_config(uri, client=client)
    return mlflow.pyfunc.load_model(uri, model_config=model_config)


def uri_and_model_config(uri: str, *, client: MlflowClient) -> tuple[str, dict[str, str] | None]:
    """Return `uri` with the version number in place of an alias, and the model config for `load_model`.

    The config contains the sha256 in the version's tag. For the URI of a run, a folder or a logged model, the config is None
    and the package must have the sha256 in MLmodel.
    """
    name_and_version: tuple[str, ...] = get_model_name_and_version(client, uri) if uri.startswith("models:/") else ()
    if len(name_and_version) != 2:
        return uri, None
    model_name, version_number = name_and_version
    sha256 = client.get_model_version(model_name, version_number).tags.get(PACKAGE_SHA256_TAG)
    if sha256 is None:
        from recsys_core.errors import StageError

        raise StageError(
            f"models:/{model_name}/{version_number} does not have the tag {PACKAGE_SHA256_TAG}, so its package cannot be "
            "verified; register the model again, and remove the version's alias if it has one"
        )
    return f"models:/{model_name}/{version_number}", {PACKAGE_SHA256_KEY: sha256}
