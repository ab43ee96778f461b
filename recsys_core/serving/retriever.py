"""Answers from a package: raw ids in, raw ids and scores out.

Shapes: B queries, I items, N candidates fetched, K items answered at most.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from recsys_core.data.jagged import JaggedArray
from recsys_core.errors import InputError
from recsys_core.retrieval.search import search, search_all
from recsys_core.serving.contents import PackageContents, read_package
from recsys_core.serving.ids import Id, is_missing
from recsys_core.serving.query_batch import Questions

ANSWER_BUDGET = 1 << 20
"""Candidates held at a time; a batch whose answer would be larger is worked off in parts."""
BATCH = 1024


class Answer(NamedTuple):
    """Items and scores for one row of a request, best first; `error` says why there are none for a row that is wrong."""

    item_ids: NDArray[Any]
    scores: NDArray[np.float32]
    error: str | None


class Retriever:
    """A loaded package. It holds no state besides, so threads may share it."""

    def __init__(self, contents: PackageContents) -> None:
        self.package = contents.package
        self._tower, self._questions = contents.tower, Questions(contents.package.model, contents.features)
        self._index, self._items, self._users = contents.index, contents.items, contents.users
        self._user_offset, self._event_item = contents.user_offset, contents.event_item
        self._popularity_I, self._popularity_share_I = contents.popularity_I, contents.popularity_share_I

    @classmethod
    def load(cls, folder: Path, *, sha256: str) -> Self:
        """Reads the package in `folder`; see read_package for sha256 and errors."""
        return cls(read_package(folder, sha256=sha256))

    def answer(
        self, user_ids: Sequence[Any], *, k: int, histories: Sequence[Any] | None = None, exclude_log: bool = True
    ) -> list[Answer]:
        """`recommend` for rows of a request, where a row with a value that is not an id gets an error and no items.

        histories: a history that is missing (None or NaN) leaves the stored one. Raises InputError if k is below 1.
        """
        given = [None] * len(user_ids) if histories is None else histories
        good_users, good_histories = [], []
        errors: dict[int, str] = {}
        for place, (user_id, history) in enumerate(zip(user_ids, given, strict=True)):
            try:
                self._users.parse([user_id])
                good_histories.append(self._history(history))
                good_users.append(user_id)
            except InputError as error:
                errors[place] = str(error)
        usable = None if histories is None else good_histories
        answered = zip(*self.recommend(good_users, k=k, histories=usable, exclude_log=exclude_log), strict=True)
        nothing: tuple[NDArray[Any], NDArray[np.float32]] = (np.zeros(0, np.int64), np.zeros(0, np.float32))
        places = range(len(user_ids))
        return [Answer(*(nothing if place in errors else next(answered)), error=errors.get(place)) for place in places]

    def _history(self, given: Any) -> list[Id] | None:
        """The history of one row of a request, None where it is missing; InputError if it is not a list of ids."""
        if is_missing(given):
            return None
        if not isinstance(given, list | tuple | np.ndarray):
            raise InputError(f"history is of type {type(given).__name__}; give a list of item ids, or leave it out")
        try:
            self._items.parse(given)
        except InputError as error:
            raise InputError(f"history: {error}") from None
        return list(given)

    def recommend(
        self,
        user_ids: Sequence[Id],
        *,
        k: int,
        histories: Sequence[Sequence[Id] | None] | None = None,
        exclude_log: bool = True,
    ) -> tuple[list[NDArray[Any]], list[NDArray[np.float32]]]:
        """For each user the best min(k, unseen) items, best first, as (item ids, scores).

        histories: per user, item ids in time order, which take the place of the stored history; None leaves it. Ids that
        the model does not know are ignored. Never answered: what a user has in the log, and what is in the given history.
        exclude_log: false lets items of the log come back to a user whose history is given, as if the log ended there; a
        version is measured so on events that its log already holds.
        Score: inner product of query and item; for users of whom nothing is known, the item's share of all events.
        Raises InputError if k is below 1, or if histories and user_ids differ in length.
        """
        if k < 1:
            raise InputError(f"k is {k}; ask for at least 1 item")
        if histories is not None and len(histories) != len(user_ids):
            raise InputError(f"{len(histories)} histories for {len(user_ids)} users; give one per user, or none at all")
        k = min(k, len(self._items))
        step = min(BATCH, max(1, ANSWER_BUDGET // k))
        user_row = self._users.rows(user_ids)
        ids: list[NDArray[Any]] = []
        scores: list[NDArray[np.float32]] = []
        for start in range(0, len(user_row), step):
            part = slice(start, start + step)
            row_BK, score_BK, found_B = self._answer(
                user_row[part], given=histories and histories[part], k=k, exclude_log=exclude_log
            )
            ids += [self._items.ids(row_K[:found]) for row_K, found in zip(row_BK, found_B, strict=True)]
            scores += [score_K[:found] for score_K, found in zip(score_BK, found_B, strict=True)]
        return ids, scores

    def knows(self, user_ids: Sequence[Id]) -> NDArray[np.bool_]:
        """[users]: whether the log had an event of each. Raises InputError for values that cannot be such an id."""
        known_B: NDArray[np.bool_] = self._users.rows(user_ids) >= 0
        return known_B

    def _answer(
        self, user_row_B: NDArray[np.int64], *, given: Sequence[Sequence[Id] | None] | None, k: int, exclude_log: bool
    ) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]:
        history, seen = self._histories(user_row_B, given=given, exclude_log=exclude_log)
        wanted_B = np.minimum(k, len(self._items) - seen.lengths)
        asked = _Answers(seen=seen, wanted_B=wanted_B, k=k, items=len(self._items))

        known_B = self.package.model.knows(history_length_B=history.lengths, user_row_B=user_row_B)
        known = np.flatnonzero(known_B)
        if len(known):
            query_BO = self._tower(self._questions.batch(user_row_B[known], history.take(known))).numpy()
            self._retrieve(known, query_BO, asked=asked)
        unknown = np.flatnonzero(~known_B)
        if len(unknown):
            depth = int(asked.depth_B[unknown].max())
            shape = (len(unknown), depth)
            asked.fill(
                unknown,
                np.broadcast_to(self._popularity_I[:depth].astype(np.int64), shape),
                np.broadcast_to(self._popularity_share_I[:depth], shape),
            )
        assert (asked.found_B == wanted_B).all()
        return asked.row_BK, asked.score_BK, asked.found_B

    def _histories(
        self, user_row_B: NDArray[np.int64], *, given: Sequence[Sequence[Id] | None] | None, exclude_log: bool
    ) -> tuple[JaggedArray, JaggedArray]:
        """(what the query is made of, what may not be answered)."""
        start_B = np.where(user_row_B >= 0, self._user_offset[user_row_B], 0)
        end_B = np.where(user_row_B >= 0, self._user_offset[user_row_B + 1], 0)
        stored = JaggedArray.from_slices(self._event_item, start=start_B, end=end_B)
        items = len(self._items)
        if given is None:
            return stored, stored.distinct(bound=items)
        length_B = np.array([0 if ids is None else len(ids) for ids in given], np.int64)
        row_T = self._items.rows([item_id for ids in given if ids is not None for item_id in ids])
        explicit = JaggedArray.from_lengths(length_B, row_T).filter(row_T >= 0)
        is_given_B = np.array([ids is not None for ids in given])
        history = stored.replace(explicit, where=is_given_B)
        return history, stored.union(explicit, bound=items) if exclude_log else history.distinct(bound=items)

    def _retrieve(self, asked_B: NDArray[np.int64], query_BO: NDArray[np.float32], *, asked: "_Answers") -> None:
        """Fetches k more than were seen, in groups of like depth; queries that the index leaves short go over all vectors."""
        kind, parameters = self.package.index_kind, self.package.index_parameters
        depth_B = asked.depth_B[asked_B]
        group_B = np.ceil(np.log2(np.maximum(depth_B, 1))).astype(np.int64)
        for group in np.unique(group_B):
            of_group = np.flatnonzero(group_B == group)
            depth = int(depth_B[of_group].max())
            score_BN, row_BN = search(self._index, query_BO[of_group], kind=kind, depth=depth, parameters=parameters)
            asked.fill(asked_B[of_group], row_BN, score_BN)
            short = of_group[asked.found_B[asked_B[of_group]] < asked.wanted_B[asked_B[of_group]]]
            if len(short):
                score_BN, row_BN = search_all(self._index, query_BO[short], kind=kind, depth=depth)
                asked.fill(asked_B[short], row_BN, score_BN)


class _Answers:
    """The answers to a batch while they are collected: what each query wants, may not get, and has got."""

    def __init__(self, *, seen: JaggedArray, wanted_B: NDArray[np.int64], k: int, items: int) -> None:
        self._seen, self._items = seen, items
        self.wanted_B = wanted_B
        self.depth_B = np.maximum(1, wanted_B + np.where(wanted_B > 0, seen.lengths, 0))
        self.found_B = np.zeros(len(wanted_B), np.int64)
        self.row_BK = np.full((len(wanted_B), k), -1, np.int64)
        self.score_BK = np.zeros((len(wanted_B), k), np.float32)

    def fill(self, asked_B: NDArray[np.int64], row_BN: NDArray[np.int64], score_BN: NDArray[np.float32]) -> None:
        """Answers the queries `asked_B` anew with the first unseen of the given candidates."""
        key_BN = np.arange(len(asked_B))[:, None] * self._items + row_BN
        keep_BN = (row_BN >= 0) & ~np.isin(key_BN, self._seen.take(asked_B).pair_keys(bound=self._items))
        place_BN = keep_BN.cumsum(axis=1) - 1
        keep_BN &= place_BN < self.wanted_B[asked_B][:, None]
        target_B1 = np.broadcast_to(asked_B[:, None], keep_BN.shape)
        self.row_BK[target_B1[keep_BN], place_BN[keep_BN]] = row_BN[keep_BN]
        self.score_BK[target_B1[keep_BN], place_BN[keep_BN]] = score_BN[keep_BN]
        self.found_B[asked_B] = keep_BN.sum(axis=1)
