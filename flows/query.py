"""Recommendations of a registered version, for `nightjar query` and for notebooks."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from flows.settings.pipeline import PipelineConfig
from recsys_core.config import Frozen
from recsys_core.errors import InputError, shown
from recsys_core.serving.requests import respond
from tasks import delivery
from tasks.progress.reporting import show_bar
from tasks.registry.loading import LoadedVersion, load_version, newest_version_number

if TYPE_CHECKING:
    from recsys_core.serving.retriever import Retriever
    from tasks.delivery.recommendations import BatchSummary
    from tasks.registry.version_overlap import VersionComparison

_MODEL_URI_PATTERN = re.compile(r"models:/([^/@]+)(?:/(\d+)|@([^/@]+))")


class RankedItem(Frozen):
    """A recommended item."""

    item_id: int | str
    score: float
    title: str | None = None


class QueryAnswer(Frozen):
    """Result of `nightjar query`, printed by --json.

    Attributes:
        known_user: whether the user is in the vocabulary of the model; False without --user.
        fallback: source of the items of an unknown user, see recsys_core.serving.answers.FALLBACKS. None for a known user, and
            for a package without users.
        num_unknown_items: number of items of --history that are not in the catalogue.
    """

    model: str
    version: str
    known_user: bool
    fallback: str | None
    num_unknown_items: int
    items: tuple[RankedItem, ...]


def recommend(
    config: PipelineConfig,
    *,
    user: str | None = None,
    history: Sequence[str] | None = None,
    item: str | None = None,
    k: int,
    model_uri: str | None,
) -> QueryAnswer:
    """Return the top `k` items from the champion, or from the version at `model_uri`.

    Args:
        user: id of a user.
        history: item ids, oldest first. They replace the stored history of the user.
        item: id of an item. The returned items are similar to this item. `user` and `history` must be None.

    Raises:
        InputError: an id is invalid, the item is unknown, `item` is combined with another argument, or all three are None.
    """
    if (item is None) == (user is None and history is None):
        raise InputError("pass --user, --history or both; or --item alone")
    retriever, model_name, version = _load(config, model_uri)
    request: dict[str, Any] = {"item_id": item, "user_id": user, "history": None if history is None else list(history)}
    inputs = {name: [value] for name, value in request.items() if value is not None}
    (prediction,) = respond(retriever, {"inputs": inputs, "params": {"k": k}})
    if prediction.error is not None:
        option = "--item" if item is not None else "--history" if prediction.error.startswith("history") else "--user"
        raise InputError(f"{option}: {prediction.error}")
    titles = retriever.items.titles(retriever.item_ids.rows(prediction.item_ids))
    return QueryAnswer(
        model=model_name,
        version=version,
        known_user=user is not None and bool(retriever.is_known([user])[0]),
        fallback=prediction.fallback,
        num_unknown_items=prediction.num_unknown_items,
        items=tuple(
            RankedItem(item_id=item_id, score=score, title=title)
            for item_id, score, title in zip(prediction.item_ids, prediction.scores, titles, strict=True)
        ),
    )


def recommend_many(config: PipelineConfig, *, folder: Path, model_uri: str | None = None) -> "BatchSummary":
    """Write the recommendations for many users with the settings `delivery.recommendations`.

    A second process in the same workspace waits for the first one, and then loads the version that is champion at that time.

    Args:
        model_uri: URI of the version; None means the champion.
    """
    settings = config.delivery.recommendations
    config.workspace.mkdir(parents=True, exist_ok=True)
    with FileLock(config.workspace / "recommend.lock"):
        retriever, model_name, _ = _load(config, model_uri)
        return delivery.recommendations.write_recommendations(
            retriever,
            settings.user_paths,
            folder=folder,
            k=settings.k,
            options={"exclude_seen": settings.exclude_seen},
            settings=recommendation_settings(config, model_name=model_name),
            on_progress=lambda num_done, num_rows: show_bar(
                "recommend", num_done=num_done, num_total=num_rows, note=f"{num_done:,} of {num_rows:,} users"
            ),
        )


def recommendation_settings(config: PipelineConfig, *, model_name: str) -> dict[str, Any]:
    """Return the settings on which the recommendations for many users depend, as JSON values."""
    return config.delivery.recommendations.model_dump(mode="json", exclude={"folder"}) | {"model_name": model_name}


def compare_versions(
    config: PipelineConfig, *, version: str | None, reference: str, num_users: int, k: int
) -> "tuple[str, str, VersionComparison]":
    """Compare the recommendations of two versions. Return the numbers of `reference` and `version`, and the comparison.

    Args:
        version: number or alias of the version; None for the newest version.
        reference: number or alias of the version with which it is compared.

    Raises:
        InputError: both are the same version, or a version does not exist.
        StageError, TrackingServerError: a version does not load, or the registry does not answer.
    """
    from tasks.registry.version_overlap import compare_recommendations  # imports torch and FAISS

    model_name = config.registry.model_name
    if version is None:
        version = newest_version_number(config.workspace, model_name)
    reference_version, compared_version = (
        load_version(config.workspace, model_name=model_name, version=number_or_alias)
        for number_or_alias in (reference, version)
    )
    if reference_version.version == compared_version.version:
        raise InputError(
            f"version {compared_version.version} would be compared with itself; name two versions with --version and --with, "
            "and list them with `nightjar releases`"
        )
    comparison = compare_recommendations(reference_version.retriever, compared_version.retriever, num_users=num_users, k=k)
    return reference_version.version, compared_version.version, comparison


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
