"""Smoke test of registered versions: recommendations for a sample of test users, computed in a fresh process.

The recommendations are validated and measured. All compared versions get the same sample.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

import mlflow
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from mlflow import MlflowClient

from recsys_core.dataset.events import EventStore
from recsys_core.dataset.layout import vocabulary_file
from recsys_core.errors import StageError, TrackingServerError, redacted
from recsys_core.evaluation.metrics import TargetPositions, UserMetrics, hit_rate, ndcg, recall
from recsys_core.manifests import InteractionsManifest
from recsys_core.seeds import SMOKE_TEST_USERS_SEED
from tasks.registry.model_uri import fetch_model

K = 20
"""Number of items that a version recommends to each user: the largest cut-off of the served metrics."""
_TIMEOUT_S = 1_800.0
_ALLOWED_VARIABLE_PATTERN = re.compile(
    r"(PATH|HOME|USER|TMPDIR|TZ|LANG|LC_\w+|LD_LIBRARY_PATH|LD_PRELOAD|VIRTUAL_ENV|PYTHON\w+|\w+_NUM_THREADS|CUDA_\w+|DO_NOT_TRACK"
    r"|MLFLOW_ALLOW_PICKLE_DESERIALIZATION|MLFLOW_DISABLE_TELEMETRY)$"
)
"""Environment variables of the process that runs the code of a version. None of them is a secret."""
_KILL_EXIT_CODES = (-signal.SIGKILL, -signal.SIGTERM)

IntArray = npt.NDArray[np.int64]
ModelProcess: TypeAlias = "subprocess.Popen[str]"


class UnusableVersionError(StageError):
    """The version does not load, does not answer, or gives invalid answers."""


class NotFetchedError(TrackingServerError):
    """The version's files could not be downloaded: MLflow does not work, or the files no longer exist."""


@dataclass(frozen=True)
class ServedSample:
    """A sample of test users with their histories. A (user, item) pair is one integer: `user_index * num_items + item_row`.

    Attributes:
        histories_file: parquet file with one row per user. The column `history` lists the ids of the items that the user had
            before the test period; the other column is `user_id`.
        item_ids: ids of the catalogue by item row.
        num_seen_U: number of distinct items in each user's history.
        seen_pair_L: the pairs of each user with the items in the user's history, ascending.
        target_pair_T: the pairs of each user with the user's test items that are not in the history, ascending.
    """

    histories_file: Path
    item_ids: pa.Array
    num_seen_U: IntArray
    seen_pair_L: IntArray
    target_pair_T: IntArray

    @property
    def num_users(self) -> int:
        """Number of users in the sample."""
        return len(self.num_seen_U)

    @property
    def num_items(self) -> int:
        """Number of items in the catalogue."""
        return len(self.item_ids)


def prepare_sample(interactions: InteractionsManifest, *, max_users: int, folder: Path) -> ServedSample:
    """Draw up to `max_users` users with test events, with a fixed seed, and write their histories to `folder`.

    Raises:
        StageError: all test items of all users are in their histories, so no metric can be computed.
    """
    event_store = EventStore.open(interactions)
    user_row_U = np.sort(
        np.random.default_rng(SMOKE_TEST_USERS_SEED).permutation(event_store.users_with_targets("test"))[:max_users]
    )
    history, targets = event_store.items_before(user_row_U, "test"), event_store.targets(user_row_U, "test")
    item_ids = pq.read_table(interactions.path(vocabulary_file("item")), columns=["id"])["id"].combine_chunks()
    user_ids = pq.read_table(interactions.path(vocabulary_file("user")), columns=["id"])["id"].take(pa.array(user_row_U))
    history_ids = pa.ListArray.from_arrays(history.offset, item_ids.take(pa.array(history.values_L)))
    folder.mkdir()
    histories_file = folder / "cases.parquet"
    pq.write_table(pa.table({"user_id": user_ids, "history": history_ids}), histories_file)
    seen_items = history.distinct(bound=len(item_ids))
    new_targets = targets.distinct(bound=len(item_ids)).difference(seen_items, bound=len(item_ids))
    if not len(new_targets.values_L):
        raise StageError(
            f"none of {len(user_row_U):,} test users has a test item that is not in the user's history, so no version can be "
            "measured; choose another test period in interactions.split"
        )
    return ServedSample(
        histories_file=histories_file,
        item_ids=item_ids,
        num_seen_U=seen_items.lengths,
        seen_pair_L=seen_items.pair_keys(bound=len(item_ids)),
        target_pair_T=new_targets.pair_keys(bound=len(item_ids)),
    )


@contextmanager
def start_processes(count: int) -> Iterator[list[ModelProcess]]:
    """Start processes for `predict_in_subprocess` before their versions exist; end the unused ones after the block.

    A process imports the libraries of a model, which takes seconds, while the caller works. It loads its version later.
    """
    processes = [_start_process() for _ in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            with process:  # closes the pipes and waits
                process.kill()


def predict_in_subprocess(
    sample: ServedSample,
    *,
    model_uri: str,
    client: MlflowClient,
    workspace: Path,
    processes: list[ModelProcess],
    output_file: Path,
) -> pa.ListArray:
    """Return the ids of the K items that the version at `model_uri` recommends to each user, computed in a fresh process.

    Args:
        processes: processes of `start_processes`. One is taken from the list; if the list is empty, a process is started.

    Raises:
        UnusableVersionError: the process failed; the message ends with the last line of its stderr.
        NotFetchedError: the version could not be downloaded.
        StageError: a signal ended the process.
    """
    model_folder, model_config = _fetch(model_uri, client=client, workspace=workspace)
    request = {
        "model_folder": str(model_folder),
        "model_config": model_config,
        "input_path": str(sample.histories_file),
        "output_path": str(output_file),
        "k": K,
    }
    with processes.pop() if processes else _start_process() as process:
        try:
            _, stderr = process.communicate(json.dumps(request), timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise UnusableVersionError(
                f"{model_uri}: no answer for {sample.num_users:,} users within {_TIMEOUT_S:,.0f} s"
            ) from None
        finally:
            process.kill()  # no effect on a process that has ended
    if process.returncode:
        last_line = (stderr.strip().splitlines() or ["no message"])[-1]
        reason = redacted(f"{model_uri}: does not answer in a fresh process (exit {process.returncode}): {last_line}")
        if process.returncode in _KILL_EXIT_CODES:
            raise StageError(f"{reason}; a signal ended the process, perhaps for lack of memory")
        raise UnusableVersionError(reason)
    return read_answers(output_file, sample=sample, model_uri=model_uri)


def read_answers(output_file: Path, *, sample: ServedSample, model_uri: str) -> pa.ListArray:
    """Return the column item_ids of a process's answers; raise UnusableVersionError unless it has one list of ids per user."""
    try:
        answers = pq.read_table(output_file)["item_ids"].combine_chunks()
    except (OSError, KeyError, pa.ArrowException) as error:
        problem = f"its process ended without a readable file of answers with the column item_ids ({type(error).__name__})"
        raise UnusableVersionError(f"{model_uri}: {problem}") from None
    if len(answers) != sample.num_users:
        raise UnusableVersionError(f"{model_uri}: {sample.num_users:,} users, but {len(answers):,} answers")
    if not pa.types.is_list(answers.type) or answers.type.value_type != sample.item_ids.type:
        raise UnusableVersionError(
            f"{model_uri}: the answers have the type {answers.type}, but lists of {sample.item_ids.type} are expected"
        )
    if answers.null_count:
        raise UnusableVersionError(f"{model_uri}: {answers.null_count:,} of {sample.num_users:,} users have no answer")
    return answers


def _start_process() -> ModelProcess:
    import_root = str(Path(__file__).parents[2])
    environment = {name: value for name, value in os.environ.items() if _ALLOWED_VARIABLE_PATTERN.match(name)} | {
        "PYTHONPATH": os.pathsep.join(filter(None, [import_root, os.environ.get("PYTHONPATH")]))
    }
    command = [sys.executable, "-m", "tasks.gate.smoke_process"]
    pipe, no_file = subprocess.PIPE, subprocess.DEVNULL
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=no_file, stderr=pipe, text=True, errors="replace")


def _fetch(model_uri: str, *, client: MlflowClient, workspace: Path) -> tuple[Path, dict[str, str] | None]:
    """Call `fetch_model`; raise UnusableVersionError or NotFetchedError."""
    mlflow.set_tracking_uri(client.tracking_uri)  # MLflow reads the address of the registry from the global settings
    try:
        return fetch_model(model_uri, client=client, workspace=workspace)
    except StageError as error:  # another model than the registered one
        raise UnusableVersionError(redacted(str(error))) from None
    except Exception as error:  # any error of MLflow, the artifact store or the network
        reason = f"{model_uri}: could not be downloaded: {type(error).__name__}: {error}"
        raise NotFetchedError(redacted(reason)) from None


def recommend_popular(sample: ServedSample, *, popular_item_I: IntArray) -> pa.ListArray:
    """Return, for each user, the ids of the K most popular items that are not in the user's history.

    Args:
        popular_item_I: item rows, the most popular first.
    """
    seen_offset = np.searchsorted(sample.seen_pair_L, np.arange(sample.num_users + 1) * sample.num_items)
    recommended_rows = []
    for user_index in range(sample.num_users):
        start, end = seen_offset[user_index : user_index + 2]
        seen_item_rows = sample.seen_pair_L[start:end] - user_index * sample.num_items
        candidate_rows = popular_item_I[: K + len(seen_item_rows)]
        recommended_rows.append(candidate_rows[~np.isin(candidate_rows, seen_item_rows)][:K])
    offsets = np.cumsum([0, *map(len, recommended_rows)])
    item_ids = sample.item_ids.take(pa.array(np.concatenate(recommended_rows)))
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), item_ids)


def invalid_answers(answers: pa.ListArray, *, sample: ServedSample) -> list[str]:
    """Describe and count the invalid recommendations: too few or too many items, unknown items, seen items, repeated items."""
    recommendations = _parse_answers(answers, sample)
    expected_num_items_U = np.minimum(K, sample.num_items - sample.num_seen_U)
    is_known_L = recommendations.item_row_L >= 0
    recommended_pairs = recommendations.user_L[is_known_L] * sample.num_items + recommendations.item_row_L[is_known_L]
    count_by_problem = {
        f"users whose number of items is not min({K}, number of unseen items)": int(
            np.sum(recommendations.num_items_U != expected_num_items_U)
        ),
        "items that are not in the catalogue": int(np.sum(~is_known_L)),
        "items the user had before": int(np.isin(recommended_pairs, sample.seen_pair_L).sum()),
        "items recommended twice to one user": len(recommended_pairs) - len(np.unique(recommended_pairs)),
    }
    return [f"{count:,} {problem} (of {sample.num_users:,} users)" for problem, count in count_by_problem.items() if count]


def user_metrics(answers: pa.ListArray, *, sample: ServedSample) -> UserMetrics:
    """Return recall@20, hit_rate@10 and ndcg@20 of each user with a target that is not in the user's history.

    The metrics are defined as in the exact evaluation. A target that is not recommended has the last position.
    """
    recommendations = _parse_answers(answers, sample)
    num_items = sample.num_items
    pair_L = np.where(recommendations.item_row_L >= 0, recommendations.user_L * num_items + recommendations.item_row_L, -1)
    answer_offset_U = np.cumsum(recommendations.num_items_U) - recommendations.num_items_U
    position_L = np.arange(len(pair_L)) - np.repeat(answer_offset_U, recommendations.num_items_U)
    _, hit_target_index, hit_answer_index = np.intersect1d(sample.target_pair_T, pair_L, return_indices=True)
    target_position_T = np.full(len(sample.target_pair_T), num_items)
    target_position_T[hit_target_index] = position_L[hit_answer_index]
    target_positions = TargetPositions.from_pairs(
        user_T=sample.target_pair_T // num_items, position_T=target_position_T, num_candidates_B=num_items - sample.num_seen_U
    )
    return UserMetrics(
        {
            "recall@20": recall(target_positions, k=20),
            "hit_rate@10": hit_rate(target_positions, k=10),
            "ndcg@20": ndcg(target_positions, k=20),
        }
    )


class _Recommendations(NamedTuple):
    """The recommended items of all users, concatenated. item_row_L is -1 for an item that is not in the catalogue."""

    user_L: IntArray
    item_row_L: IntArray
    num_items_U: IntArray


def _parse_answers(answers: pa.ListArray, sample: ServedSample) -> _Recommendations:
    num_items_U = pc.list_value_length(answers).to_numpy(zero_copy_only=False).astype(np.int64)
    item_rows = pc.fill_null(pc.index_in(answers.flatten(), value_set=sample.item_ids), -1)
    item_row_L = item_rows.to_numpy(zero_copy_only=False).astype(np.int64)
    return _Recommendations(np.repeat(np.arange(sample.num_users), num_items_U), item_row_L, num_items_U)
