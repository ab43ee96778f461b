"""The MLflow client: address, bounded waits, retries, and failures in one sentence without secrets.

It imports no stage and no model code: `nightjar releases` needs nothing else.
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

from recsys_core.errors import NightjarError, TrackingServerError, redacted

LOG = logging.getLogger("nightjar")
# MLflow logs each database error with its SQL and a traceback before it raises it.
logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)

RUN_ID_TAG = "nightjar.run_id"
ANSWER_TIMEOUT_S = 15.0
"""Time for MLflow to answer a command, or a stage that can do without the answer."""
RETRY_TIMEOUT_S = 120.0
"""Time from the first attempt after which a registration starts no further attempt."""
_SHOWN_CHARACTERS = 300
_TRANSIENT = ("DEADLINE_EXCEEDED", "INTERNAL_ERROR", "REQUEST_LIMIT_EXCEEDED", "TEMPORARILY_UNAVAILABLE")
_FAILURES = (MlflowException, requests.RequestException, SQLAlchemyError)

T = TypeVar("T")


def tracking_uri(workspace: Path) -> str:
    """MLFLOW_TRACKING_URI, or the sqlite database in the workspace."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{_embedded(workspace)}"


def connect(workspace: Path) -> MlflowClient:
    """A client of a server that answers. TrackingServerError if there is no answer within ANSWER_TIMEOUT_S."""
    workspace.mkdir(parents=True, exist_ok=True)
    uri = tracking_uri(workspace)
    if not os.environ.get("MLFLOW_TRACKING_URI") and not _embedded(workspace).exists():
        return _open(uri, workspace=workspace)  # creating the database takes seconds and waits for no server
    return within(ANSWER_TIMEOUT_S, lambda: _open(uri, workspace=workspace), uri=uri)


def within(timeout_s: float, call: Callable[[], T], *, uri: str) -> T:
    """What `call` returns. TrackingServerError if it fails or takes longer than `timeout_s`; its thread then ends by itself."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # raised again in the caller's thread
            outcome.set_exception(error)

    threading.Thread(target=run, name="mlflow-call", daemon=True).start()
    try:
        return outcome.result(timeout_s)
    except NightjarError:
        raise
    except Exception as error:  # whatever MLflow, its database driver or the network raises
        if isinstance(error, TimeoutError) and not outcome.done():
            raise _unavailable(f"no answer within {timeout_s:g} s", uri=uri) from None
        raise tracking_error(error, uri=uri) from None


def persist(call: Callable[[], T], *, uri: str) -> T:
    """What `call`, which must be repeatable, returns; a failure that may pass is retried with backoff for RETRY_TIMEOUT_S."""

    def warn(state: RetryCallState) -> None:
        if state.attempt_number == 1 and state.outcome is not None:
            error = state.outcome.exception()
            assert isinstance(error, Exception)
            LOG.warning("%s; retrying for up to %.0f s", tracking_error(error, uri=uri), RETRY_TIMEOUT_S)

    attempts = Retrying(
        retry=retry_if_exception(_is_transient),
        wait=wait_random_exponential(max=15),
        stop=stop_after_delay(RETRY_TIMEOUT_S),
        before_sleep=warn,
        reraise=True,
    )
    try:
        return attempts(call)
    except _FAILURES as error:
        raise tracking_error(error, uri=uri) from None


def tracking_error(error: Exception, *, uri: str) -> TrackingServerError:
    """One sentence: the address without its password, and the first line of what lies at the root of `error`."""
    if isinstance(error, TrackingServerError):
        return error
    root: BaseException = error
    while cause := root.__cause__ or root.__context__:
        root = cause
    message = next(iter(str(root).splitlines()), "")[:_SHOWN_CHARACTERS]
    name = "" if isinstance(root, MlflowException) else f"{type(root).__name__}: "
    return _unavailable(f"{name}{message}", uri=uri)


def _open(uri: str, *, workspace: Path) -> MlflowClient:
    client = MlflowClient(uri)
    with FileLock(workspace / ".mlflow.lock"):  # two processes that migrate a new sqlite file at once break it
        client.search_experiments(max_results=1)
    return client


def _embedded(workspace: Path) -> Path:
    return workspace.absolute() / "mlflow.db"


def _is_transient(error: BaseException) -> bool:
    if isinstance(error, MlflowException):
        return error.error_code in _TRANSIENT
    return isinstance(error, TrackingServerError | requests.RequestException | OperationalError)


def _unavailable(problem: str, *, uri: str) -> TrackingServerError:
    return TrackingServerError(redacted(f"MLflow at {uri} does not work: {problem}; check the server and MLFLOW_TRACKING_URI"))
