"""decision.html: the decision about a version on one page, with its comparisons, metrics, training and examples.

Shapes: L recommended items of all users, T targets, I items.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
from markupsafe import Markup

from recsys_core import plots
from recsys_core.comparison.decision import Evidence, read_evidence
from recsys_core.dataset.events import EventStore
from recsys_core.dataset.layout import ITEM_TITLES_FILE, vocabulary_file
from recsys_core.errors import MAX_SHOWN_CHARACTERS, printable
from recsys_core.evaluation.report import draw_loss, metric_table, slice_rows
from recsys_core.manifests import (
    DataReportManifest,
    Dataset,
    EvaluationManifest,
    IndexManifest,
    InteractionsManifest,
    RegistrationManifest,
    TrainManifest,
)
from recsys_core.plots import render_page
from recsys_core.retrieval.plot import draw_indexes
from recsys_core.serving.ids import Id
from tasks.gate.report_plots import RecommendedItems, draw_differences, draw_popularity, draw_scores, draw_trend
from tasks.registry.config import RegistryConfig
from tasks.runs.context import StageContext

LIST_METRIC_PREFIXES = (
    "test/coverage@",
    "test/novelty@",
    "test/gini@",
    "test/popularity_lift@",
    "test/diversity@",
    "test/known_negatives@",
)
NUM_SAMPLE_USERS, NUM_SHOWN_ITEMS = 10, 10
_TEMPLATE = Path(__file__).with_name("decision.html")
_TONE_BY_OUTCOME = {"accepted": "good", "rejected": "bad", "not_enough_data": "none"}
_LABEL_BY_OUTCOME = {"accepted": "✓ passed", "rejected": "✗ failed", "not_enough_data": "- not enough data"}


class SampleUser(NamedTuple):
    """A test user with the newest items of the history, and the best recommendations with their scores.

    An item is represented by its title, or by its id if it has no title.
    """

    user_id: str
    history: list[str]
    recommended: list[tuple[str, float]]


def write_report(registration_fields: dict[str, Any], context: StageContext, *, config: RegistryConfig, folder: Path) -> Path:
    """Write decision.html into `folder` from the files that the gate wrote there. Return its path.

    Args:
        registration_fields: fields of RegistrationManifest, by name.
        config: settings of the gate.
        folder: folder of the stage `register`, which is not complete yet.
    """
    results, evaluation = context.results, context.results[EvaluationManifest]
    metrics = evaluation.metrics
    registration = RegistrationManifest.model_construct(**registration_fields)
    evidence = read_evidence(folder)
    compared_numbers = [fact.baseline.removeprefix("version ") for fact in evidence if fact.baseline.startswith("version ")]
    items_by_version = _read_recommended_items(
        folder / "smoke_test", results[InteractionsManifest], version_numbers=[registration.version, *compared_numbers[:1]]
    )
    page = render_page(
        _TEMPLATE,
        filters={
            "escaped": lambda text: printable(text, max_characters=MAX_SHOWN_CHARACTERS),
            "percent": format_percent,
        },
        registration=registration,
        run_id=context.run.run_id,
        tone={"Promoted": "good", "NotPromoted": "bad", "NotEnoughData": "warn"}[registration.state_name],
        evidence=evidence,
        tone_by_outcome=_TONE_BY_OUTCOME,
        label_by_outcome=_LABEL_BY_OUTCOME,
        metric=config.metric,
        margin=config.gate.max_relative_drop,
        num_unknown_items_by_version={
            version_name: int(np.sum(items.item_row_L < 0)) for version_name, items in items_by_version.items()
        },
        data_metrics=results[DataReportManifest].metrics,
        tables={
            "Metrics over the full catalogue": metric_table(metrics, half_widths=evaluation.half_widths),
            "Recommended items": metric_table(
                metrics, shown=[name.removeprefix("test/") for name in metrics if name.startswith(LIST_METRIC_PREFIXES)]
            ),
        },
        slices=slice_rows(evaluation.slices) if evaluation.slices else [],
        index=results[IndexManifest].reports[results[IndexManifest].served_index],
        plots=_plots_by_title(registration, context, evidence, items_by_version, metric=config.metric),
        sample_users=_sample_users(
            folder / "smoke_test", version_number=registration.version, title_by_id=_title_by_id(context.dataset)
        ),
    )
    page_path = folder / Path(RegistrationManifest.pages["decision"]).name
    page_path.write_text(page, encoding="utf-8")
    return page_path


def _plots_by_title(
    registration: RegistrationManifest,
    context: StageContext,
    evidence: Sequence[Evidence],
    items_by_version: Mapping[str, RecommendedItems],
    *,
    metric: str,
) -> dict[str, Markup]:
    index, store = context.results[IndexManifest], EventStore.open(context.results[InteractionsManifest])
    target_item_T = store.targets(store.users_with_targets("test"), "test").values_L
    figure_by_title = {
        "Difference to the champion": draw_differences(evidence),
        f"{metric} of the last runs": draw_trend(registration, context, metric=metric),
        "Scores of the recommended items": draw_scores(items_by_version),
        "Popularity of the recommended items": draw_popularity(
            items_by_version, train_count_I=store.train_count_I, target_item_T=target_item_T
        ),
        "Training": draw_loss(context.results[TrainManifest]),
        "Index": draw_indexes(index),
    }
    return {title: plots.to_svg(figure) for title, figure in figure_by_title.items() if figure is not None}


def format_percent(share: float | None) -> str:
    """Format a signed share in percent.

    >>> format_percent(0.0123), format_percent(None)
    ('+1.2 %', '-')
    """
    return "-" if share is None else f"{100 * share:+z.1f} %"


def _read_recommended_items(
    folder: Path, interactions: InteractionsManifest, *, version_numbers: Sequence[str]
) -> dict[str, RecommendedItems]:
    """Read the recommended items of each version, by version name, such as `version 3`."""
    item_ids = pq.read_table(interactions.path(vocabulary_file("item")), columns=["id"])["id"].combine_chunks()
    items_by_version = {}
    for version_number in version_numbers:
        answer_table = pq.read_table(folder / f"answers-{version_number}.parquet")
        item_id_L, score_L = (answer_table[name].combine_chunks().flatten() for name in ("item_ids", "scores"))
        item_rows = pc.fill_null(pc.index_in(item_id_L, value_set=item_ids), -1)
        items_by_version[f"version {version_number}"] = RecommendedItems(
            score_L.to_numpy(), item_rows.to_numpy().astype(np.int64)
        )
    return items_by_version


def _title_by_id(dataset: Dataset) -> dict[Id, str]:
    """Return the title of each item by item id; empty if there is no title column."""
    if dataset.features is None or ITEM_TITLES_FILE not in dataset.features.files:
        return {}
    title_table = pq.read_table(dataset.features.path(ITEM_TITLES_FILE))
    item_ids = pq.read_table(dataset.interactions.path(vocabulary_file("item")), columns=["id"])["id"]
    return dict(zip(item_ids.take(title_table["row"]).to_pylist(), title_table["title"].to_pylist(), strict=True))


def _sample_users(folder: Path, *, version_number: str, title_by_id: Mapping[Id, str]) -> list[SampleUser]:
    """Return the first users of the smoke test, with the recommendations of the version."""
    cases = pq.read_table(folder / "cases.parquet").slice(0, NUM_SAMPLE_USERS).to_pylist()
    answers = pq.read_table(folder / f"answers-{version_number}.parquet").slice(0, NUM_SAMPLE_USERS).to_pylist()
    return [
        SampleUser(
            str(case["user_id"]),
            [title_by_id.get(item_id, str(item_id)) for item_id in case["history"][: -NUM_SHOWN_ITEMS - 1 : -1]],
            [
                (title_by_id.get(item_id, str(item_id)), score)
                for item_id, score in zip(answer["item_ids"], answer["scores"], strict=True)
            ][:NUM_SHOWN_ITEMS],
        )
        for case, answer in zip(cases, answers, strict=True)
    ]
