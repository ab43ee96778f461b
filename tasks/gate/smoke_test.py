"""Smoke test of registered versions: recommendations for a sample of test users, computed in a fresh process.

`tasks/gate/sample.py` validates and measures the recommendations.
"""

import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Self

import pyarrow as pa
import pyarrow.parquet as pq
from mlflow import MlflowClient

from recsys_core.errors import StageError, TrackingServerError, redacted
from recsys_core.serving.description import DESCRIPTION_NAME, QUERY_COLUMNS, PackageDescription
from tasks.gate.sample import Answers, K, UserSample
from tasks.registry.loading import fetch_model

_TIMEOUT_S = 1_800.0
_ALLOWED_VARIABLE_PATTERN = re.compile(
    r"(PATH|HOME|USER|TMPDIR|TZ|LANG|LC_\w+|LD_LIBRARY_PATH|LD_PRELOAD|VIRTUAL_ENV|PYTHON\w+|\w+_NUM_THREADS|CUDA_\w+|DO_NOT_TRACK"
    r"|MLFLOW_ALLOW_PICKLE_DESERIALIZATION|MLFLOW_DISABLE_TELEMETRY)$"
)
"""Environment variables, without secrets, for the process that runs the code of a version."""
_KILL_EXIT_CODES = (-signal.SIGKILL, -signal.SIGTERM)


class UnusableVersionError(StageError):
    """The version does not load, does not answer, or gives invalid answers."""


class NotFetchedError(TrackingServerError):
    """The version's files could not be downloaded: MLflow does not work, or the files no longer exist."""


class ModelProcess:
    """A process that loads each version and recommends with it in a fork of itself.

    The process imports the libraries of a model, which takes seconds, while the caller does other work. If the process has
    ended, the next request starts another process.
    """

    def __init__(self) -> None:
        self._stderr = TemporaryFile(buffering=0)  # noqa: SIM115  __exit__ closes it
        self._num_read_stderr_bytes = 0
        self._process = self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        self._stderr.close()

    def answer(self, request: Mapping[str, object]) -> tuple[int, str]:
        """Send a request to `tasks.gate.smoke_process`; return the exit code of the fork and its last line of stderr.

        Raises:
            TimeoutError: there was no answer within _TIMEOUT_S.
        """
        if self._process.poll() is not None:
            self._kill()
            self._process = self._start()
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError):  # the process has ended, so the answer is empty
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        if not select.select([process.stdout], [], [], _TIMEOUT_S)[0]:
            self._kill()
            raise TimeoutError
        exit_code_line = process.stdout.readline()
        exit_code = int(exit_code_line) if exit_code_line else process.wait()
        self._stderr.seek(self._num_read_stderr_bytes)
        stderr = self._stderr.read()
        self._num_read_stderr_bytes += len(stderr)
        return exit_code, (stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]

    def _start(self) -> "subprocess.Popen[str]":
        import_root = str(Path(__file__).parents[2])
        environment = {name: value for name, value in os.environ.items() if _ALLOWED_VARIABLE_PATTERN.match(name)} | {
            "PYTHONPATH": os.pathsep.join(filter(None, [import_root, os.environ.get("PYTHONPATH")]))
        }
        command = [sys.executable, "-m", "tasks.gate.smoke_process"]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, env=environment, stdin=pipe, stdout=pipe, stderr=self._stderr, text=True, process_group=0
        )

    def _kill(self) -> None:
        """Kill the process and its fork, if they are still running."""
        with suppress(BrokenPipeError), self._process:  # `with` closes the pipes and waits for the process
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)


def predict_in_subprocess(
    sample: UserSample,
    *,
    model_uri: str,
    client: MlflowClient,
    workspace: Path,
    process: ModelProcess,
    output_file: Path,
) -> Answers:
    """Return the K items that the version at `model_uri` recommends to each user, computed in a fresh process.

    Raises:
        UnusableVersionError: the fork failed, did not answer in time, or did not write one list of items per user.
        NotFetchedError: the version could not be downloaded.
        StageError: SIGKILL or SIGTERM ended the process.
    """
    with TemporaryDirectory(prefix="nightjar-", ignore_cleanup_errors=True) as folder_name:
        model_folder, model_config = _fetch(model_uri, client=client, workspace=workspace, download_folder=Path(folder_name))
        num_bytes = sum(path.stat().st_size for path in model_folder.rglob("*") if path.is_file())
        request = {
            "model_folder": str(model_folder),
            "model_config": model_config,
            "input_path": str(_request_file(sample, model_folder=model_folder, output_file=output_file)),
            "output_path": str(output_file),
            "k": K,
        }
        try:
            exit_code, last_line = process.answer(request)
        except TimeoutError:
            raise UnusableVersionError(
                f"{model_uri}: no answer for {sample.num_users:,} users within {_TIMEOUT_S:,.0f} s"
            ) from None
    if exit_code:
        reason = redacted(f"{model_uri}: does not answer in a fresh process (exit {exit_code}): {last_line}")
        if exit_code in _KILL_EXIT_CODES:
            raise StageError(f"{reason}; a signal ended the process, perhaps for lack of memory")
        raise UnusableVersionError(reason)
    return Answers(*read_answers(output_file, sample=sample, model_uri=model_uri), num_bytes)


def _request_file(sample: UserSample, *, model_folder: Path, output_file: Path) -> Path:
    """Return the file with the requests. If the package stores no users, write a file with their features."""
    try:
        package = PackageDescription.model_validate_json(
            (model_folder / "artifacts" / "package" / DESCRIPTION_NAME).read_bytes()
        )
    except (OSError, ValueError):  # the version does not load
        return sample.histories_file
    if package.users == "stored":
        return sample.histories_file
    requests = pq.read_table(sample.histories_file, columns=list(QUERY_COLUMNS))
    for name, values in sample.feature_columns(package).items():
        requests = requests.append_column(name, values)
    request_file = output_file.with_name(f"requests-of-{output_file.name}")
    pq.write_table(requests, request_file)
    return request_file


def read_answers(output_file: Path, *, sample: UserSample, model_uri: str) -> tuple[pa.ListArray, float]:
    """Return the item ids that a process recommended, and its CPU time in seconds (NaN if the file does not have the time).

    Raises:
        UnusableVersionError: the file does not have one list of item ids per user.
    """
    try:
        table = pq.read_table(output_file)
        item_id_lists = table["item_ids"].combine_chunks()
    except (OSError, KeyError, pa.ArrowException) as error:
        problem = f"its process ended without a readable file of answers with the column item_ids ({type(error).__name__})"
        raise UnusableVersionError(f"{model_uri}: {problem}") from None
    if len(item_id_lists) != sample.num_users:
        raise UnusableVersionError(f"{model_uri}: {sample.num_users:,} users, but {len(item_id_lists):,} answers")
    if not pa.types.is_list(item_id_lists.type) or item_id_lists.type.value_type != sample.item_ids.type:
        raise UnusableVersionError(
            f"{model_uri}: the answers have the type {item_id_lists.type}, but lists of {sample.item_ids.type} are expected"
        )
    if item_id_lists.null_count:
        raise UnusableVersionError(f"{model_uri}: {item_id_lists.null_count:,} of {sample.num_users:,} users have no answer")
    return item_id_lists, float((table.schema.metadata or {}).get(b"cpu_s", "nan"))


def _fetch(
    model_uri: str, *, client: MlflowClient, workspace: Path, download_folder: Path
) -> tuple[Path, dict[str, str] | None]:
    """Call `fetch_model`; raise UnusableVersionError or NotFetchedError."""
    try:
        return fetch_model(model_uri, client=client, workspace=workspace, download_folder=download_folder)
    except StageError as error:  # the files are not the registered model
        raise UnusableVersionError(redacted(str(error))) from None
    except Exception as error:  # any error of MLflow, the artifact store or the network
        reason = f"{model_uri}: could not be downloaded: {type(error).__name__}: {error}"
        raise NotFetchedError(redacted(reason)) from None
