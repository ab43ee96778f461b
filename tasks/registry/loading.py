"""Loading of registered versions, whose packages and code are verified first."""

import hashlib
import os
import shutil
import weakref
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlparse

import mlflow.artifacts
import mlflow.pyfunc
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.pyfunc import PyFuncModel
from mlflow.store.artifact.utils.models import get_model_name_and_version

from recsys_core.errors import InputError, NightjarError, StageError, redacted, shown
from tasks.registry.mlflow_client import call_with_deadline, connect, tracking_error
from tasks.registry.releases import version_number_by_alias

if TYPE_CHECKING:
    from recsys_core.serving.retriever import Retriever

PACKAGE_SHA256_TAG = "nightjar.package_sha256"
PACKAGE_SHA256_KEY = "package_sha256"
"""Key of the model config in MLmodel that holds the sha256 of package.json."""
VERSION_KEY = "version"
"""Key of the model config that holds the version number, which is part of every answer."""

LOGGED_MODELS_FILE_NAME = "logged-models.sha256"
"""File with the sha256 of each model that a run of the workspace logged to the workspace's MLflow.

A model contains code. MLflow's server can change versions and artifacts, but not this file.
"""
_UNHASHED_NAMES = ("registered_model_meta", "__pycache__")
"""Names that the sha256 ignores: a file that MLflow writes when it loads a version, and bytecode. Bytecode is removed before
the check, so that it is never loaded."""
_MAX_VERSION_DIGITS = 9
"""A number with more digits may be too large for the integers of MLflow's database, which then fails."""


class LoadedVersion(NamedTuple):
    """The Retriever of a registered version, with the name of the model and the number of the version."""

    retriever: "Retriever"
    model_name: str
    version: str


def newest_version_number(workspace: Path, model_name: str) -> str:
    """Return the number of the newest version; raise InputError if there is none."""
    client = connect(workspace)
    versions = call_with_deadline(lambda: client.search_model_versions(f"name = '{model_name}'"), uri=client.tracking_uri)
    if not versions:
        raise InputError(f"{model_name} has no version; register one with `nightjar run`")
    return str(max(int(version.version) for version in versions))


def version_number_with_alias(workspace: Path, *, model_name: str, alias: str = "champion") -> str | None:
    """Return the number of the version with an alias; None if no version has the alias."""
    client = connect(workspace)
    number_by_alias = call_with_deadline(lambda: version_number_by_alias(client, model_name), uri=client.tracking_uri)
    return (number_by_alias or {}).get(alias)


def load_version(workspace: Path, *, model_name: str, version: str = "champion") -> LoadedVersion:
    """Load a version from the MLflow of the workspace and verify its package.

    Args:
        version: number or alias of the version.

    Raises:
        InputError: the model has no such version or alias.
        StageError: the version does not load, or no run of the workspace logged it.
        TrackingServerError: MLflow does not work.
    """
    client = connect(workspace)
    if version.isdecimal() and len(version) <= _MAX_VERSION_DIGITS:
        version = str(int(version))  # without zeros at the beginning, as in the registry
    version_number = (
        version if version.isdecimal() else version_number_with_alias(workspace, model_name=model_name, alias=version)
    )
    if version_number is None and version not in ("champion", "challenger"):
        raise InputError(
            f"the registered model {model_name!r} has no version with the alias {shown(version)} in "
            f"{redacted(client.tracking_uri)}; list the aliases with `nightjar releases`"
        )
    if version_number is None:
        challenger_number = version_number_with_alias(workspace, model_name=model_name, alias="challenger")
        promotion_advice = ""
        if challenger_number is not None:
            promotion_advice = f"promote the challenger with `nightjar promote --version {challenger_number}`, or "
        raise InputError(
            f"the registered model {model_name!r} has no {version} in {redacted(client.tracking_uri)}; "
            f"{promotion_advice}register a version with `nightjar run`"
        )
    if len(version_number) > _MAX_VERSION_DIGITS:
        raise InputError(
            f"the registered model {model_name!r} has no version {version_number[:50]}; list the versions with "
            "`nightjar releases`"
        )
    failure_text = redacted(f"models:/{model_name}/{version_number}: cannot be loaded from {client.tracking_uri}")
    try:
        model = load_model(f"models:/{model_name}/{version_number}", client=client, workspace=workspace)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            raise InputError(f"{failure_text}: {redacted(error.message)}; list the versions with `nightjar releases`") from None
        raise tracking_error(error, uri=client.tracking_uri) from None
    except NightjarError:
        raise
    except Exception as error:  # any error of a damaged model
        raise StageError(f"{failure_text}: {redacted(f'{type(error).__name__}: {error}')}") from None
    return LoadedVersion(model.unwrap_python_model().retriever, model_name, version_number)


def load_model(uri: str, *, client: MlflowClient, workspace: Path) -> PyFuncModel:
    """Load the model at `uri` after `fetch_model` has verified it.

    Downloaded files are removed when the retriever of the model is freed, or at the end of the process.
    """
    download_folder = Path(mkdtemp(prefix="nightjar-"))
    try:
        folder, model_config = fetch_model(uri, client=client, workspace=workspace, download_folder=download_folder)
        model = mlflow.pyfunc.load_model(str(folder), model_config=model_config)
        retriever = model.unwrap_python_model().retriever  # reads its files until it is freed
    except BaseException:
        shutil.rmtree(download_folder, ignore_errors=True)
        raise
    if any(download_folder.iterdir()):
        weakref.finalize(retriever, _remove_folder, download_folder, process_id=os.getpid())
    else:  # the files are on a local disk, so they were not copied
        download_folder.rmdir()
    return model


def _remove_folder(folder: Path, *, process_id: int) -> None:
    """Remove a folder, except in a fork of the process that created it, because a fork may end first."""
    if os.getpid() == process_id:
        shutil.rmtree(folder, ignore_errors=True)


def fetch_model(
    uri: str, *, client: MlflowClient, workspace: Path, download_folder: Path, copies_local_files: bool = False
) -> tuple[Path, dict[str, str]]:
    """Return the folder of the version at `uri`, and the model config for MLflow. Remote files are downloaded.

    The model config contains the sha256 from the version's tag, with which loading verifies the package. If the version is in
    the MLflow of the workspace, a run of the workspace must have logged the model: the files of the model must be below the
    workspace and unchanged. Code of the model is not executed.

    Args:
        download_folder: folder for the copy of a version whose files are not on a local disk.
        copies_local_files: whether to also copy files on a local disk, except files in the MLflow of the workspace.

    Raises:
        StageError: the version does not have the tag, or no run of the workspace logged its model.
    """
    model_name, version_number = get_model_name_and_version(client, uri)
    sha256 = client.get_model_version(model_name, version_number).tags.get(PACKAGE_SHA256_TAG)
    if sha256 is None:
        raise StageError(
            f"models:/{model_name}/{version_number} does not have the tag {PACKAGE_SHA256_TAG}, so its package cannot be "
            "verified; register the model again, and remove the version's alias if it has one"
        )
    is_workspace_mlflow = client.tracking_uri == f"sqlite:///{workspace.absolute()}/mlflow.db"
    location = urlparse(client.get_model_version_download_uri(model_name, version_number))
    is_copied = not is_workspace_mlflow and (copies_local_files or location.scheme not in ("", "file"))
    folder = _download_model(f"models:/{model_name}/{version_number}", client, folder=download_folder if is_copied else None)
    if is_workspace_mlflow:
        _require_logged_model(folder, workspace, uri)
    return folder, {PACKAGE_SHA256_KEY: sha256, VERSION_KEY: str(version_number)}


def _download_model(uri: str, client: MlflowClient, *, folder: Path | None = None) -> Path:
    mlflow.set_tracking_uri(client.tracking_uri)  # MLflow reads the address of the registry from the global settings
    return Path(
        mlflow.artifacts.download_artifacts(
            uri, tracking_uri=client.tracking_uri, dst_path=None if folder is None else str(folder)
        )
    )


def record_logged_model(uri: str, *, client: MlflowClient, workspace: Path) -> None:
    """Add the sha256 of a logged model to LOGGED_MODELS_FILE_NAME. The caller registers the model as a version afterwards."""
    folder, hashes_file = _download_model(uri, client), workspace / LOGGED_MODELS_FILE_NAME
    # A full disk may have cut off the last line.
    line_break = "\n" if hashes_file.is_file() and not hashes_file.read_bytes().endswith(b"\n") else ""
    with hashes_file.open("a") as file:
        file.write(f"{line_break}{model_sha256(folder)}  {uri}\n")
        file.flush()
        os.fsync(file.fileno())


def model_sha256(folder: Path) -> str:
    """Return a sha256 over the names and contents of a model's files, except bytecode.

    Of the package, only package.json is included, because it has the checksums of the package's other files.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        relative_path = path.relative_to(folder)
        is_package_data = relative_path.parts[:2] == ("artifacts", "package") and path.name != "package.json"
        if path.is_symlink() or (
            path.is_file() and not is_package_data and not set(_UNHASHED_NAMES) & set(relative_path.parts)
        ):
            content = str(path.readlink()).encode() if path.is_symlink() else path.read_bytes()
            digest.update(f"{relative_path}\0{hashlib.sha256(content).hexdigest()}\n".encode())
    return digest.hexdigest()


def _require_logged_model(folder: Path, workspace: Path, uri: str) -> None:
    artifact_folder, hashes_file = workspace.absolute() / "mlartifacts", workspace / LOGGED_MODELS_FILE_NAME
    if not folder.resolve().is_relative_to(artifact_folder.resolve()):
        raise _untrusted_error(uri, f"its files are in {folder}, which is not below {artifact_folder}")
    lines = hashes_file.read_text().splitlines() if hashes_file.is_file() else []
    logged_hashes = {line.partition("  ")[0] for line in lines}
    for bytecode_folder in [path for path in folder.rglob("__pycache__") if path.is_dir() and not path.is_symlink()]:
        shutil.rmtree(bytecode_folder, ignore_errors=True)
    sha256 = model_sha256(folder)
    if sha256 not in logged_hashes:
        raise _untrusted_error(uri, f"{folder} has the sha256 {sha256[:12]}, which is not in {hashes_file}")


def _untrusted_error(uri: str, problem: str) -> StageError:
    return StageError(
        f"{uri}: no run of this workspace logged this model: {problem}; the code of the model was not executed; register a new "
        "version with `nightjar run`, and delete this version"
    )
