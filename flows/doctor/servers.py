"""Checks of the Prefect server and the MLflow server for `nightjar doctor FILE`, without retries."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

import httpx
import requests
from mlflow.utils.credentials import get_default_host_creds
from mlflow.utils.rest_utils import http_request
from prefect.client.orchestration import SyncPrefectClient
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError

from flows.settings.pipeline import PipelineConfig
from recsys_core.errors import first_line, redacted
from recsys_core.preflight import is_compatible_server
from tasks.registry.mlflow_client import tracking_error, tracking_uri

REQUEST_TIMEOUT_S = 4.0
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
PREFECT_ERRORS = (httpx.HTTPError, ValueError)  # ValueError: the answer is not JSON
_MLFLOW_SEARCH_PATH = "/api/2.0/mlflow/registered-models/search?max_results=1"

Status = Literal["ok", "problem", "not used"]


class Finding(NamedTuple):
    """Result of one check. The text of a problem ends with the fix."""

    status: Status
    text: str


def ok(text: str) -> Finding:
    """Return the finding of a check that passed."""
    return Finding("ok", text)


def problem(text: str) -> Finding:
    """Return the finding of a check that failed. `text` names the place, the values and the fix. Passwords are hidden."""
    return Finding("problem", redacted(text))


def not_used(text: str) -> Finding:
    """Return the finding of a check that does not apply to this installation."""
    return Finding("not used", text)


def check_prefect() -> Finding:
    """Check that the server of PREFECT_API_URL answers, has a password and a compatible version."""
    api_url = os.environ.get("PREFECT_API_URL")
    if not api_url:
        return not_used("embedded: every command starts its own server; set PREFECT_API_URL to use a running one")
    try:
        with short_prefect_client() as client:
            server_version = client.api_version()
    except PREFECT_ERRORS as error:
        if isinstance(error, httpx.HTTPStatusError) and error.response.status_code in (401, 403):
            return _access_denied(api_url, error.response.status_code, fix="set PREFECT_API_AUTH_STRING to user:password")
        return problem(
            f"{api_url}: {first_line(error)}; check the server, and that PREFECT_API_URL is its address and ends in /api"
        )
    has_password = _has_password(f"{api_url.rstrip('/')}/admin/version")
    protection = "PREFECT_SERVER_API_AUTH_STRING"
    return _check_server("prefect", server_version, address=api_url, has_password=has_password, protection=protection)


def check_mlflow(config: PipelineConfig) -> Finding:
    """Check that the server of MLFLOW_TRACKING_URI answers, has a password and a compatible version.

    Without a server, check that the database can be opened.
    """
    uri = tracking_uri(config.workspace)
    if not uri.startswith(("http://", "https://")):
        return _check_mlflow_database(uri)
    try:
        version_response, search_response = (
            http_request(get_default_host_creds(uri), path, "GET", max_retries=0, timeout=REQUEST_TIMEOUT_S)
            for path in ("/version", _MLFLOW_SEARCH_PATH)
        )
        if search_response.status_code in (401, 403):
            fix = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            return _access_denied(uri, search_response.status_code, fix=fix)
        for response in (version_response, search_response):
            response.raise_for_status()
    except Exception as error:  # MLflow wraps the errors of requests
        return problem(str(tracking_error(error, uri=uri)))
    has_password = _has_password(uri.rstrip("/") + _MLFLOW_SEARCH_PATH)
    protection = "`mlflow server --app-name basic-auth`"
    server_version = version_response.text.strip()
    return _check_server("mlflow", server_version, address=uri, has_password=has_password, protection=protection)


def _check_mlflow_database(database_uri: str) -> Finding:
    try:
        database_url = make_url(database_uri)
        if database_url.get_backend_name() == "sqlite" and not os.path.exists(database_url.database or ""):  # noqa: PTH110
            return not_used(f"embedded: the first run creates {database_url.database}")
        with create_engine(database_url).connect() as connection:
            revision = connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one()
    except (SQLAlchemyError, ModuleNotFoundError, ValueError) as error:  # ValueError: the port is not a number
        root_cause = first_line(getattr(error, "orig", None) or error)
        return problem(f"{database_uri}: {root_cause}; check MLFLOW_TRACKING_URI, and that the extra `servers` is installed")
    return ok(f"{redacted(database_uri)}, schema {revision}")


@contextmanager
def short_prefect_client() -> Iterator[SyncPrefectClient]:
    """Yield a client of the server in PREFECT_API_URL, with a short timeout and the credentials of the environment."""
    with SyncPrefectClient(
        os.environ["PREFECT_API_URL"],
        auth_string=os.environ.get("PREFECT_API_AUTH_STRING"),
        api_key=os.environ.get("PREFECT_API_KEY"),
        httpx_settings={"timeout": REQUEST_TIMEOUT_S},
    ) as client:
        yield client


def _has_password(url: str) -> bool | None:
    """Return whether the server rejects a request without credentials; None after any other error."""
    session = requests.Session()
    session.trust_env = False  # use neither credentials from ~/.netrc nor a proxy
    try:
        response = session.get(url, timeout=REQUEST_TIMEOUT_S)
    except requests.RequestException:
        return None
    return False if response.ok else True if response.status_code in (401, 403) else None


def _access_denied(address: str, http_status: int, *, fix: str) -> Finding:
    return problem(f"{address}: access denied (status {http_status}); {fix}")


def _check_server(package: str, server_version: str, *, address: str, has_password: bool | None, protection: str) -> Finding:
    """Compare the versions of a server and of the installed package; report a server that has no password.

    Args:
        has_password: None if this is not known.
        protection: variable or command that protects the server with a password, for the message.
    """
    installed_version = metadata.version(package)
    server_text = f"{redacted(address)}, version {server_version}"
    if not is_compatible_server(server_version, installed_version):
        return problem(
            f"{server_text}, but this machine has {package} {installed_version}; the server needs the same major version and "
            "must not be older: update the server first"
        )
    if has_password is False and urlsplit(address).hostname not in LOOPBACK_HOSTS:
        return problem(f"{server_text} has no password: whoever reaches it can run code on the workers; set {protection}")
    password_texts = {True: ", with password", False: "", None: ", not known whether it has a password"}
    return ok(server_text + password_texts[has_password])
