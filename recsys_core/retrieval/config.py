"""Configuration of the FAISS indexes."""

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, model_validator

from recsys_core.config import Settings
from recsys_core.errors import InputError
from recsys_core.retrieval.auto import Auto
from recsys_core.retrieval.kinds import AnyIndexKind, Flat, Hnsw
from recsys_core.units import GIB

_CLASS_BY_KIND = {kind_class.model_fields["kind"].default: kind_class for kind_class in get_args(get_args(AnyIndexKind)[0])}
_NAME_BY_EARLIER_NAME = {"served_kind": "served", "compared_kinds": "compared"}
_EARLIER_SETTINGS = ("nlist", "nprobe", "pq_m", "pq_nbits", "hnsw_m", "ef_construction", "ef_search")
"""Settings that applied to all indexes in earlier versions. Now each index has the settings of its kind."""
MAX_SHARDS = 1_024
MAX_SHARD_BYTES = 4 * GIB
"""Approximate largest size of a shard with `shards: auto`."""


class IndexConfig(Settings):
    """FAISS indexes that search the item vectors by inner product.

    For cosine similarity, the vectors have the norm 1, or a little more with a popularity term.
    """

    served: Annotated[Auto | AnyIndexKind, Field(discriminator="kind")] = Field(
        default_factory=Hnsw,
        description="index in the served model: its kind, or its kind and the settings of the kind",
    )
    compared: tuple[AnyIndexKind, ...] = Field(
        (),
        description="further indexes that are built and measured for comparison, with the kinds and settings of `index.served` "
        "except `auto`. If `index.served` is `auto`, it may choose one of these indexes. `flat` is always built, because the "
        "recall of the other kinds is measured against it",
    )
    recall_target: float = Field(
        0.95,
        gt=0,
        le=1,
        description="recall of an index compared with an exact search. If `nprobe` or `ef_search` is not set, the fastest "
        "value that reaches this recall on validation queries is used. If no value reaches the recall, the value "
        "with the highest recall is used, with a warning",
    )
    recall_k: int = Field(100, ge=1, le=10_000, description="cut-off K of the recall that `recall_target` limits")
    shards: Annotated[int, Field(ge=1, le=MAX_SHARDS)] | Literal["auto"] = Field(
        1,
        description="number of shards of each index. One shard at a time is built in memory, and a search merges the results "
        "of all shards. With `auto`, an index is divided into as few shards of at most about 4 GiB as possible",
    )

    @property
    def configured_indexes(self) -> tuple[AnyIndexKind, ...]:
        """The flat index and all indexes in the config, without repetitions. flat is first because it gives the exact results.

        >>> [index.kind for index in IndexConfig(served="hnsw", compared=("ivf_pq", "hnsw")).configured_indexes]
        ['flat', 'hnsw', 'ivf_pq']
        """
        served_indexes = () if isinstance(self.served, Auto) else (self.served,)
        return tuple(dict.fromkeys((Flat(), *served_indexes, *self.compared)))

    def indexes_to_build(self, *, num_items: int, dim: int) -> tuple[AnyIndexKind, ...]:
        """Return the indexes to build for a catalogue: `configured_indexes`, and the other candidates of `auto`.

        >>> [index.kind for index in IndexConfig(served="auto", compared=("ivf_pq",)).indexes_to_build(num_items=9_000, dim=64)]
        ['flat', 'ivf_pq', 'hnsw']

        Raises:
            InputError: the settings of an index do not fit the vector width, or no candidate of auto fits its max_bytes.
        """
        if (problem := self.problem(dim)) is not None:
            raise InputError(f"index: {problem}")
        if not isinstance(self.served, Auto):
            return self.configured_indexes
        configured_kinds = {index.kind for index in self.configured_indexes}
        candidates = self.served.candidates(num_items=num_items, dim=dim)
        return (*self.configured_indexes, *(index for index in candidates if index.kind not in configured_kinds))

    def num_shards(self, index: AnyIndexKind, *, num_items: int, dim: int) -> int:
        """Return the number of shards of an index.

        >>> hundred_million = {"num_items": 100_000_000, "dim": 64}
        >>> [IndexConfig(shards="auto").num_shards(index, **hundred_million) for index in (Flat(), Hnsw())]
        [7, 13]
        """
        if self.shards != "auto":
            return min(self.shards, num_items)
        return min(-(-index.min_bytes(num_items=num_items, dim=dim) // MAX_SHARD_BYTES), num_items)

    def result_settings(self) -> dict[str, Any]:
        """Return the settings that change the result, without `shards: 1`, which earlier versions did not have."""
        settings = super().result_settings()
        if self.shards == 1:
            del settings["shards"]
        return settings

    def problem(self, dim: int) -> str | None:
        """Return the error message of the first index that does not suit vectors of width `dim`; None if all suit them."""
        return next((problem for index in self.configured_indexes if (problem := index.problem(dim)) is not None), None)

    @model_validator(mode="after")
    def _check_settings_are_equal(self) -> Self:
        for index in self.compared:
            for other_index in self.configured_indexes:
                if index.kind == other_index.kind and index != other_index:
                    raise ValueError(
                        f"two indexes have the kind {index.kind}, but different settings ({other_index!r} and {index!r}); "
                        "only one index of a kind is built, so remove one of them"
                    )
        return self

    @model_validator(mode="before")
    @classmethod
    def _expand_short_forms(cls, settings: Any) -> Any:
        """Convert the name of a kind to its group of settings, and settings of earlier versions to current settings."""
        if not isinstance(settings, dict):
            return settings
        settings = dict(settings)
        for earlier_name, name in _NAME_BY_EARLIER_NAME.items():
            if earlier_name in settings and name in settings:
                raise ValueError(f"{earlier_name} is the earlier name of {name}, and both are set; remove {earlier_name}")
            if earlier_name in settings:
                settings[name] = settings.pop(earlier_name)
        earlier_settings = {name: settings.pop(name) for name in _EARLIER_SETTINGS if name in settings}
        settings["served"] = _index_settings(settings.get("served", {}), earlier_settings, default_kind="hnsw")
        if isinstance(compared := settings.get("compared"), list | tuple):
            settings["compared"] = tuple(_index_settings(index, earlier_settings) for index in compared)
        return settings


def _index_settings(index: Any, earlier_settings: dict[str, Any], *, default_kind: str | None = None) -> Any:
    """Return the settings of an index with the earlier settings that its kind has. Only text and dicts are converted."""
    index_settings = {"kind": index} if isinstance(index, str) else index
    if not isinstance(index_settings, dict):
        return index_settings
    if default_kind is not None:
        index_settings = {"kind": default_kind} | index_settings
    kind_class = _CLASS_BY_KIND.get(str(index_settings.get("kind")))
    known_settings = kind_class.model_fields if kind_class is not None else {}
    return {name: value for name, value in earlier_settings.items() if name in known_settings} | index_settings
