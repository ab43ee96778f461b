"""A version on trial: asked for test users' items in a fresh process; its answers are checked and measured.

Legend: N users on trial, K items asked for. A pair is `case * items + item row`: one number for "this user, this item".
"""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recsys_core.data.events import EventStore
from recsys_core.errors import StageError, TrackingServerError, redacted
from recsys_core.evaluation.metrics import TargetRanks, hit_rate, ndcg, recall
from recsys_core.manifests import InteractionsManifest
from tasks.registry.smoke_process import NOT_FETCHED

K = 20
"""Items asked for: the deepest cut-off of the served metrics."""
_TIMEOUT_S = 1_800.0
_SEED = 0
_ENDED_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)

Ints = npt.NDArray[np.int64]


class UnusableVersionError(StageError):
    """A version that does not load or does not answer."""


class NotFetchedError(TrackingServerError):
    """A version whose files were not read: MLflow does not work, or they are gone."""


@dataclass(frozen=True)
class Trial:
    """The same users and questions for every version that is compared. `file`: parquet with user_id, history."""

    file: Path
    item_ids: pa.Array
    seen_N: Ints
    seen_pairs: Ints
    target_pairs: Ints

    @property
    def users(self) -> int:
        """How many users are asked about."""
        return len(self.seen_N)


def prepare_trial(interactions: InteractionsManifest, *, users: int, folder: Path) -> Trial:
    """A fixed sample of `users` test users, each with all it had before the test as an explicit history of raw ids."""
    store = EventStore.open(interactions)
    rows_N = np.sort(np.random.default_rng(_SEED).permutation(store.users_with_targets("test"))[:users])
    before, targets = store.before(rows_N, "test"), store.targets(rows_N, "test")
    item_ids = pq.read_table(interactions.path("items.parquet"), columns=["id"])["id"].combine_chunks()
    user_ids = pq.read_table(interactions.path("users.parquet"), columns=["id"])["id"].take(pa.array(rows_N))
    history = pa.ListArray.from_arrays(before.offset, item_ids.take(pa.array(before.row_T)))
    folder.mkdir()
    pq.write_table(pa.table({"user_id": user_ids, "history": history}), folder / "cases.parquet")
    seen = before.distinct(rows=len(item_ids))
    new = targets.distinct(rows=len(item_ids)).without(seen, rows=len(item_ids))
    if not len(new.row_T):
        raise StageError(f"none of {len(rows_N):,} test users has a target it had not before, so no version can be measured")
    return Trial(
        file=folder / "cases.parquet",
        item_ids=item_ids,
        seen_N=seen.length_N,
        seen_pairs=seen.keys_T(rows=len(item_ids)),
        target_pairs=new.keys_T(rows=len(item_ids)),
    )


def ask(trial: Trial, *, model_uri: str, tracking_uri: str, answers: Path) -> pa.ListArray:
    """The K items that the version recommends to each user on trial.

    UnusableVersionError, or NotFetchedError, with the last line of a failed process.
    """
    root = str(Path(__file__).parents[2])
    environment = os.environ | {
        "MLFLOW_TRACKING_URI": tracking_uri,
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
    }
    command = [sys.executable, "-m", "tasks.registry.smoke_process", model_uri, str(trial.file), str(answers), "--k", str(K)]
    try:
        subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        last_line = ((error.stderr or "").strip().splitlines() or ["no message"])[-1]
        reason = redacted(f"{model_uri}: does not answer in a fresh process (exit {error.returncode}): {last_line}")
        if error.returncode == NOT_FETCHED:
            raise NotFetchedError(reason) from None
        if error.returncode in _ENDED_FROM_OUTSIDE:
            raise StageError(f"{reason}; a signal ended it, memory may be short") from None
        raise UnusableVersionError(reason) from None
    except subprocess.TimeoutExpired:
        raise UnusableVersionError(f"{model_uri}: no answer for {trial.users:,} users within {_TIMEOUT_S:,.0f} s") from None
    return pq.read_table(answers)["item_ids"].combine_chunks()


def answer_by_popularity(trial: Trial, *, popular_I: Ints) -> pa.ListArray:
    """The K most popular items (`popular_I`: item rows by falling popularity) that each user did not have before."""
    items = len(trial.item_ids)
    first = np.searchsorted(trial.seen_pairs, np.arange(trial.users + 1) * items)
    row_lists = []
    for case in range(trial.users):
        seen = trial.seen_pairs[first[case] : first[case + 1]] - case * items
        head = popular_I[: K + len(seen)]
        row_lists.append(head[~np.isin(head, seen)][:K])
    offsets = np.cumsum([0, *map(len, row_lists)])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), trial.item_ids.take(pa.array(np.concatenate(row_lists))))


def find_faults(answers: pa.ListArray, *, trial: Trial) -> list[str]:
    """What no served answer may be: of the wrong length, an unknown id (-1 too), seen before, twice the same."""
    case, row, count_N = _answered(answers, trial)
    items = len(trial.item_ids)
    wanted_N = np.minimum(K, items - trial.seen_N)
    known = row >= 0
    pairs = case[known] * items + row[known]
    faults = {
        f"users with other than {K} items (or all unseen ones)": int(np.sum(count_N != wanted_N)),
        "items that are not in the catalogue": int(np.sum(~known)),
        "items the user had before": int(np.isin(pairs, trial.seen_pairs).sum()),
        "items recommended twice to one user": len(pairs) - len(np.unique(pairs)),
    }
    return [f"{count:,} {fault} (of {trial.users:,} users)" for fault, count in faults.items() if count]


def measure(answers: pa.ListArray, *, trial: Trial) -> dict[str, float]:
    """recall@20, hit_rate@10, ndcg@20 over the users with a target they had not before, as in the exact evaluation."""
    case, row, count_N = _answered(answers, trial)
    items = len(trial.item_ids)
    pairs = np.where(row >= 0, case * items + row, -1)
    rank = np.arange(len(case)) - np.repeat(np.cumsum(count_N) - count_N, count_N)
    _, target_place, answer_place = np.intersect1d(trial.target_pairs, pairs, return_indices=True)
    rank_P = np.full(len(trial.target_pairs), items)
    rank_P[target_place] = rank[answer_place]
    ranks = TargetRanks.of_pairs(user_P=trial.target_pairs // items, rank_P=rank_P, candidates_E=items - trial.seen_N)
    per_user = {"recall@20": recall(ranks, k=20), "hit_rate@10": hit_rate(ranks, k=10), "ndcg@20": ndcg(ranks, k=20)}
    return {name: float(value_U.mean()) for name, value_U in per_user.items()}


def _answered(answers: pa.ListArray, trial: Trial) -> tuple[Ints, Ints, Ints]:
    """Case and item row (-1: not in the catalogue) of every recommended item, and how many each user got."""
    if len(answers) != trial.users:
        raise StageError(f"{trial.file}: {trial.users:,} users were asked about, {len(answers):,} answers came")
    count_N = pc.list_value_length(answers).to_numpy(zero_copy_only=False).astype(np.int64)
    row = pc.fill_null(pc.index_in(answers.flatten(), value_set=trial.item_ids), -1).to_numpy(zero_copy_only=False)
    return np.repeat(np.arange(trial.users), count_N), row.astype(np.int64), count_N
