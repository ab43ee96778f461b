"""MLflow client: server address, deadlines, retries, and errors in one sentence without passwords.

The module imports neither stages nor model code, so that `nightjar releases` starts fast.
"""

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import requests
from filelock import FileLock
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from sqlalchemy.exc import OperationalError, SQLAlchemyError
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_delay, wait_random_exponential

from recsys_core.disk import disk_full_error, is_disk_full
from recsys_core.errors import NightjarError, TrackingServerError, redacted

LOG = logging.getLogger("nightjar")
# MLflow logs each database error with its SQL and a traceback before it raises the error.
logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)

RUN_ID_TAG = "nightjar.run_id"
RUN_REASON_TAG = "nightjar.run_reason"
"""Tag of an MLflow run and of a version: why a person started the run."""
ANSWER_TIMEOUT_S = 15.0
"""Deadline of a call whose result is optional, or for which a user waits."""
RETRY_TIMEOUT_S = 120.0
"""Time for which a registration retries a failed call."""
SQLITE_PREFIX = "sqlite:///"
_MAX_MESSAGE_LENGTH = 300
_TRANSIENT_ERROR_CODES = ("DEADLINE_EXCEEDED", "INTERNAL_ERROR", "REQUEST_LIMIT_EXCEEDED", "TEMPORARILY_UNAVAILABLE")
_MLFLOW_ERRORS = (MlflowException, requests.RequestException, SQLAlchemyError)

T = TypeVar("T")


def tracking_uri(workspace: Path) -> str:
    """Return MLFLOW_TRACKING_URI, or the URI of the sqlite database in the workspace."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"{SQLITE_PREFIX}{_embedded_database_path(workspace)}"


def connect(workspace: Path, *, timeout_s: float | None = None) -> MlflowClient:
    """Return a client of MLflow after a test request; raise TrackingServerError if MLflow does not answer.

    Args:
        timeout_s: deadline of the answer; None: ANSWER_TIMEOUT_S.
    """
    workspace.mkdir(parents=True, exist_ok=True)
    uri = tracking_uri(workspace)
    if not mlflow_exists(workspace):
        return _open_client(uri, workspace=workspace)  # no deadline: MLflow creates the database, which takes seconds
    return call_with_deadline(lambda: _open_client(uri, workspace=workspace), uri=uri, timeout_s=timeout_s)


def mlflow_exists(workspace: Path) -> bool:
    """Return whether there is a server to connect to, or a database in the workspace."""
    return bool(os.environ.get("MLFLOW_TRACKING_URI")) or _embedded_database_path(workspace).exists()


def call_with_deadline(call: Callable[[], T], *, uri: str, timeout_s: float | None = None) -> T:
    """Run `call` in a thread and return its result. Raise TrackingServerError if the call fails or exceeds the deadline.

    A call that exceeds the deadline is not stopped: its thread ends when the call returns.

    Args:
        timeout_s: deadline; None: ANSWER_TIMEOUT_S.
    """
    if timeout_s is None:
        timeout_s = ANSWER_TIMEOUT_S
    future: Future[T] = Future()

    def run_call() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # raised again in the caller's thread
            future.set_exception(error)

    threading.Thread(target=run_call, name="mlflow-call", daemon=True).start()
    try:
        return future.result(timeout_s)
    except NightjarError:
        raise
    except Exception as error:  # any error of MLflow, its database driver or the network
        if isinstance(error, TimeoutError) and not future.done():
            raise _unavailable_error(f"no answer within {timeout_s:g} s", uri=uri) from None
        raise tracking_error(error, uri=uri) from None


def call_or_warn(call: Callable[[MlflowClient], T], *, workspace: Path, warning: str) -> T | None:
    """Return call(client). If MLflow fails or exceeds a deadline, log `warning` with the reason and return None.

    The connection and the call each have a deadline of ANSWER_TIMEOUT_S.
    """
    try:
        client = connect(workspace)
        return call_with_deadline(lambda: call(client), uri=client.tracking_uri)
    except NightjarError as error:
        LOG.warning("%s (%s)", warning, error)
        return None


def call_with_retries(call: Callable[[], T], *, uri: str) -> T:
    """Return call(). After a transient failure, repeat the call with backoff for up to RETRY_TIMEOUT_S.

    Raises:
        TrackingServerError: the failure is permanent, or it lasts longer than RETRY_TIMEOUT_S.
        InputError: the disk of the sqlite database is full.
    """

    def warn_of_first_failure(retry_state: RetryCallState) -> None:
        if retry_state.attempt_number == 1 and retry_state.outcome is not None:
            error = retry_state.outcome.exception()
            assert isinstance(error, Exception)
            LOG.warning("%s; retrying for up to %.0f s", tracking_error(error, uri=uri), RETRY_TIMEOUT_S)

    retrying = Retrying(
        retry=retry_if_exception(_is_transient),
        wait=wait_random_exponential(max=15),
        stop=stop_after_delay(RETRY_TIMEOUT_S),
        before_sleep=warn_of_first_failure,
        reraise=True,
    )
    try:
        return retrying(call)
    except _MLFLOW_ERRORS as error:
        raise tracking_error(error, uri=uri) from None


def tracking_error(error: Exception, *, uri: str) -> NightjarError:
    """Return an error with one sentence: the address without its password, and the first line of the root cause of `error`.

    If the disk of an sqlite database is full, return an InputError with the file and the free space.
    """
    if isinstance(error, TrackingServerError):
        return error
    if uri.startswith(SQLITE_PREFIX) and is_disk_full(error):
        return disk_full_error(Path(uri.removeprefix(SQLITE_PREFIX)), reason="MLflow's database has to grow")
    root_cause: BaseException = error
    while cause := root_cause.__cause__ or root_cause.__context__:
        root_cause = cause
    message = next(iter(str(root_cause).splitlines()), "")[:_MAX_MESSAGE_LENGTH]
    error_prefix = "" if isinstance(root_cause, MlflowException) else f"{type(root_cause).__name__}: "
    return _unavailable_error(f"{error_prefix}{message}", uri=uri)


def _open_client(uri: str, *, workspace: Path) -> MlflowClient:
    client = MlflowClient(uri)
    with FileLock(workspace / ".mlflow.lock"):  # two processes must not migrate a new sqlite file at the same time
        # Any request tests the server. MLflow's registry store imports faster than its tracking store.
        client.search_registered_models(max_results=1)
    return client


def _embedded_database_path(workspace: Path) -> Path:
    return workspace.absolute() / "mlflow.db"


def _is_transient(error: BaseException) -> bool:
    if is_disk_full(error):
        return False
    if isinstance(error, MlflowException):
        return error.error_code in _TRANSIENT_ERROR_CODES
    return isinstance(error, TrackingServerError | requests.RequestException | OperationalError)


def _unavailable_error(problem: str, *, uri: str) -> TrackingServerError:
    return TrackingServerError(redacted(f"MLflow at {uri} does not work: {problem}; check the server and MLFLOW_TRACKING_URI"))
