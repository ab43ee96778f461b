"""Recommendations of a registered version, for `nightjar query` and for notebooks."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from flows.settings.pipeline import PipelineConfig
from recsys_core.config import Frozen
from recsys_core.errors import InputError, shown
from recsys_core.serving.requests import answer, parse
from tasks.registry.loading import LoadedVersion, load_version

if TYPE_CHECKING:
    from recsys_core.serving.retriever import Retriever
    from tasks.delivery.recommendations import BatchSummary

_MODEL_URI_PATTERN = re.compile(r"models:/([^/@]+)(?:/(\d+)|@([^/@]+))")


class RankedItem(Frozen):
    """A recommended item."""

    item_id: int | str
    score: float


class UserAnswer(Frozen):
    """Result of `nightjar query`, printed by --json.

    Attributes:
        known_user: whether the user is in the vocabulary of the model; an unknown user gets the most popular items.
    """

    model: str
    version: str
    known_user: bool
    items: tuple[RankedItem, ...]


def recommend(config: PipelineConfig, *, user: str, k: int, model_uri: str | None) -> UserAnswer:
    """Return the top `k` items for a user from the champion, or from the version at `model_uri`."""
    retriever, model_name, version = _load(config, model_uri)
    (prediction,) = answer(retriever, parse({"inputs": {"user_id": [user]}, "params": {"k": k}}))
    if prediction.error is not None:
        raise InputError(f"--user: {prediction.error}")
    items = tuple(
        RankedItem(item_id=item_id, score=score) for item_id, score in zip(prediction.item_ids, prediction.scores, strict=True)
    )
    return UserAnswer(model=model_name, version=version, known_user=bool(retriever.is_known([user])[0]), items=items)


def recommend_many(config: PipelineConfig, retriever: "Retriever", *, folder: Path) -> "BatchSummary":
    """Write the recommendations of `retriever` for many users with the settings `delivery.recommendations`."""
    from tasks.delivery.recommendations import write_recommendations  # imports torch and FAISS
    from tasks.progress.reporting import show_bar

    settings = config.delivery.recommendations
    return write_recommendations(
        retriever,
        settings.user_paths,
        folder=folder,
        k=settings.k,
        options={"exclude_seen": settings.exclude_seen},
        scratch_folder=config.workspace,
        on_progress=lambda num_done, num_rows: show_bar(
            "recommend", num_done=num_done, num_total=num_rows, note=f"{num_done:,} of {num_rows:,} users"
        ),
    )


def load_retriever(config: PipelineConfig, model_uri: str | None = None) -> "Retriever":
    """Load the champion, or the version at `model_uri` such as models:/nightjar/3, as a Retriever."""
    return _load(config, model_uri).retriever


def _load(config: PipelineConfig, model_uri: str | None) -> LoadedVersion:
    if model_uri is None:
        return load_version(config.workspace, model_name=config.registry.model_name)
    uri_match = _MODEL_URI_PATTERN.fullmatch(model_uri)
    if uri_match is None:
        raise InputError(f"{shown(model_uri)} is not the URI of a version; use models:/NAME/VERSION or models:/NAME@ALIAS")
    model_name, version_number, alias = uri_match.groups()
    return load_version(config.workspace, model_name=model_name, version=version_number or alias)
