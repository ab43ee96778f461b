"""Answers of the Retriever: recommended items with their scores, their origin, and optionally the vectors of queries and items.

Shapes: B queries, L recommended items of all queries, D width of the vectors.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recsys_core.serving.ids import Id

Fallback = Literal["history", "features", "popularity"]
FALLBACKS: tuple[Fallback | None, ...] = (None, "history", "features", "popularity")
"""Origins of the recommendations of a query. The index of an origin is its code in Recommendations.

- None: the model knows the user, or the package has no users.
- history: the user is unknown, and the items come from the history in the request.
- features: the user is unknown, and the items come from the features in the request.
- popularity: the items are the most popular ones, because the request has nothing that the model reads.
"""


class Answer(NamedTuple):
    """Recommended items for one row of a request, best first. An invalid row has an error and no items.

    Attributes:
        version, space_id: the model version that answered, and the id of its vector space.
        fallback: see FALLBACKS.
        num_unknown_items: number of items of the history that are ignored because they are not in the catalogue.
        query_vector, item_vectors: only with `with_vectors`.
    """

    item_ids: list[Id]
    scores: list[float]
    version: str
    space_id: str
    fallback: Fallback | None = None
    num_unknown_items: int = 0
    error: str | None = None
    query_vector: list[float] | None = None
    item_vectors: list[list[float]] | None = None

    def to_dict(self, *, with_vectors: bool) -> dict[str, Any]:
        """Return the fields by name, and the vectors only if `with_vectors` is true."""
        fields = self._asdict()
        return fields if with_vectors else {name: value for name, value in fields.items() if name not in _VECTOR_FIELDS}


_VECTOR_FIELDS = ("query_vector", "item_vectors")


@dataclass(frozen=True)
class Recommendations(Sequence[Answer]):
    """Recommendations for some queries, as arrays. Element i of the sequence is the Answer of query i.

    Attributes:
        item_id_L, score_L: item ids and scores of all queries, one query after the other.
        offset: [B + 1]; query i has the elements from offset[i] to offset[i + 1] of item_id_L and score_L.
        fallback_code_B: index into FALLBACKS.
        errors: error messages by query; a query with an error has no items.
        query_BD, item_vector_LD: only with `with_vectors`. The vector of a query whose items the model does not rank is zero.
    """

    item_id_L: NDArray[Any]
    score_L: NDArray[np.float32]
    offset: NDArray[np.int64]
    fallback_code_B: NDArray[np.int8]
    num_unknown_items_B: NDArray[np.int64]
    version: str
    space_id: str
    errors: Mapping[int, str] = field(default_factory=dict)
    query_BD: NDArray[np.float32] | None = None
    item_vector_LD: NDArray[np.float32] | None = None

    @property
    def item_ids(self) -> list[NDArray[Any]]:
        """The recommended ids of each query, best first."""
        return np.split(self.item_id_L, self.offset[1:-1]) if len(self) else []

    @property
    def scores(self) -> list[NDArray[np.float32]]:
        """The scores of the items of each query: inner products of query and item vector, or shares of events."""
        return np.split(self.score_L, self.offset[1:-1]) if len(self) else []

    @property
    def fallbacks(self) -> list[Fallback | None]:
        """The origin of the recommendations of each query."""
        return [FALLBACKS[code] for code in self.fallback_code_B]

    def __len__(self) -> int:
        return len(self.offset) - 1

    def __getitem__(self, query: Any) -> Any:
        if isinstance(query, slice):
            return [self[index] for index in range(*query.indices(len(self)))]
        query = range(len(self))[query]
        item_slice = slice(int(self.offset[query]), int(self.offset[query + 1]))
        return Answer(
            item_ids=self.item_id_L[item_slice].tolist(),
            scores=self.score_L[item_slice].tolist(),
            version=self.version,
            space_id=self.space_id,
            fallback=FALLBACKS[self.fallback_code_B[query]],
            num_unknown_items=int(self.num_unknown_items_B[query]),
            error=self.errors.get(query),
            query_vector=None if self.query_BD is None else self.query_BD[query].tolist(),
            item_vectors=None if self.item_vector_LD is None else self.item_vector_LD[item_slice].tolist(),
        )

    def __iter__(self) -> Iterator[Answer]:
        return (self[query] for query in range(len(self)))


def join_batches(batches: Sequence[Recommendations], *, errors: Mapping[int, str] | None = None) -> Recommendations:
    """Join the recommendations of consecutive batches. errors: error messages by query."""
    first_batch = batches[0]
    if len(batches) == 1 and not errors:
        return first_batch
    num_items_B = np.concatenate([np.diff(batch.offset) for batch in batches])
    query_BD_by_batch = [batch.query_BD for batch in batches if batch.query_BD is not None]
    item_vector_LD_by_batch = [batch.item_vector_LD for batch in batches if batch.item_vector_LD is not None]
    return Recommendations(
        item_id_L=np.concatenate([batch.item_id_L for batch in batches]),
        score_L=np.concatenate([batch.score_L for batch in batches]),
        offset=np.concatenate([[0], np.cumsum(num_items_B)]),
        fallback_code_B=np.concatenate([batch.fallback_code_B for batch in batches]),
        num_unknown_items_B=np.concatenate([batch.num_unknown_items_B for batch in batches]),
        version=first_batch.version,
        space_id=first_batch.space_id,
        errors=errors or {},
        query_BD=np.concatenate(query_BD_by_batch) if query_BD_by_batch else None,
        item_vector_LD=np.concatenate(item_vector_LD_by_batch) if item_vector_LD_by_batch else None,
    )
