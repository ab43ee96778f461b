"""Commands that use the model registry: from `query` and `releases` to `serve`, `push` and `clean`."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal

from flows.cli import output
from flows.cli.arguments import command_line
from flows.cli.commands.session import one_sentence_errors
from flows.interruption import interruptible
from flows.push import push_version
from flows.query import QueryAnswer, compare_versions, recommend_many
from flows.query import recommend as recommend_to_one
from flows.settings.config_file import LoadedConfig
from flows.settings.pipeline import PipelineConfig
from recsys_core.errors import InputError, StageError, printable
from recsys_core.imports import fast_imports
from recsys_core.units import format_gib, format_metric
from tasks.registry.mlflow_client import RUN_ID_TAG, call_with_deadline, connect
from tasks.registry.releases import list_releases
from tasks.retention.clean import Removals, clean
from tasks.runs.workspace import Workspace


def query(
    config: PipelineConfig,
    *,
    user: str | None,
    history: str | None,
    item: str | None,
    k: int,
    model_uri: str | None,
    as_json: bool,
) -> None:
    """Print the top `k` items of the champion, or of the version at `model_uri`.

    Args:
        history: item ids, separated by commas.
    """
    history_ids = None if history is None else [item_id.strip() for item_id in history.split(",") if item_id.strip()]
    answer = recommend_to_one(config, user=user, history=history_ids, item=item, k=k, model_uri=model_uri)
    for note in _notes(answer, user=user):
        output.print_line(note, console=output.stderr)
    if as_json:
        output.print_json(answer.model_dump_json())
        return
    value_by_option = {"user": user, "history": history, "item": item}
    subject = ", ".join(f"{name} {printable(value)}" for name, value in value_by_option.items() if value is not None)
    output.print_line(f"{answer.model} version {answer.version}, {subject}")
    has_titles = any(ranked_item.title is not None for ranked_item in answer.items)
    rows = [
        [*([ranked_item.title or "-"] if has_titles else []), str(ranked_item.item_id), format_metric(ranked_item.score)]
        for ranked_item in answer.items
    ]
    output.print_table([*(["title"] if has_titles else []), "item", "score"], rows)


def _notes(answer: QueryAnswer, *, user: str | None) -> Iterator[str]:
    """Yield a sentence about each difference from the usual answer to a known user."""
    if answer.fallback is not None:
        items_text = (
            "the most popular items" if answer.fallback == "popularity" else f"recommended from the {answer.fallback} alone"
        )
        if user is None and answer.fallback == "popularity":
            yield f"the history has no item of version {answer.version}: these are {items_text}"
        elif user is not None and not answer.known_user:
            yield f"user {printable(user)} is unknown to version {answer.version}: these are {items_text}"
        elif user is not None:
            yield f"version {answer.version} has no history of user {printable(user)}: these are {items_text}"
    if answer.num_unknown_items:
        subject_and_verb = "item of the history is" if answer.num_unknown_items == 1 else "items of the history are"
        yield f"{answer.num_unknown_items} {subject_and_verb} unknown to version {answer.version}"


def recommend(config: PipelineConfig, *, model_uri: str | None, as_json: bool) -> None:
    """Write the recommendations for many users with the settings `delivery.recommendations`, and print a summary."""
    folder = config.delivery.recommendations.folder
    if folder is None:
        raise InputError("--out is missing, and delivery.recommendations.folder is not set; choose a folder for the files")
    start_s = time.perf_counter()
    with interruptible(lambda: f"{folder} is as before"), output.printed_stages():
        summary = recommend_many(config, folder=folder, model_uri=model_uri)
    if as_json:
        output.print_json(json.dumps(summary._asdict()))
        return
    users_per_s = summary.num_rows / (time.perf_counter() - start_s)
    num_users_by_origin = {name: count for name, count in summary.num_rows_by_fallback.items() if count}
    output.print_labelled(
        {
            "files": str(folder),
            "version": summary.version,
            "users": f"{summary.num_rows:,}, at most {summary.k:,} items each, {users_per_s:,.0f} users/s including the start",
            "columns read": ", ".join(summary.columns),
            "items from": ", ".join(f"{name}: {count:,} users" for name, count in num_users_by_origin.items()),
        }
    )


def serve(config: PipelineConfig, *, alias: str) -> None:
    """Serve the version with the alias `alias` over HTTP, until Ctrl-C or SIGTERM."""
    from tasks.serve.server import serve as serve_champion

    stop_event = threading.Event()
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, lambda *_: stop_event.set())

    def print_address(url: str, version: str) -> None:
        model_name = config.registry.model_name
        output.print_labelled(
            {
                "serving": f"{model_name} version {version}, in {config.serve.num_workers} processes",
                "requests": f"{url}/recommend, {url}/similar",
                "schema": f"{url}/openapi.json",
                "state": f"{url}/readyz, {url}/metrics",
                "end": "Ctrl-C",
            }
        )

    with output.printed_log():
        serve_champion(
            config.serve,
            config.workspace,
            model_name=config.registry.model_name,
            alias=alias,
            stop_event=stop_event,
            on_ready=print_address,
        )


def releases(loaded_config: LoadedConfig, *, as_json: bool) -> None:
    """Print one row per registered version: alias, creation, metrics of the recommendations, run and reason."""
    client, model_name = connect(loaded_config.config.workspace), loaded_config.config.registry.model_name
    all_releases: Sequence[Mapping[str, Any]] = call_with_deadline(
        lambda: list_releases(client, model_name), uri=client.tracking_uri
    )
    if as_json:
        output.print_json(json.dumps(all_releases))
        return
    if not all_releases:
        output.print_line(f"no version of {model_name} yet; register one with: {command_line('run', loaded_config)}")
        return
    metric_names = sorted({name for release in all_releases for name in release["metrics"] if name.startswith("served/")})
    rows = [
        [
            f"{release['version']} (from {release['parent']})" if release["parent"] else release["version"],
            release["aliases"] or "-",
            release["created"],
            *(format_metric(release["metrics"].get(name)) for name in metric_names),
            release["run_id"],
            release["by_hand"] or release["reasons"] or f"smoke test {release['smoke']}",
        ]
        for release in all_releases
    ]
    metric_titles = [name.removeprefix("served/") for name in metric_names]
    column_titles = ["version", "alias", "created (UTC)", *metric_titles, "run", "reason"]
    output.print_table(column_titles, rows, left_columns=(0, len(column_titles) - 1))


def compare(loaded_config: LoadedConfig, *, version: str | None, reference: str, num_users: int, k: int, as_json: bool) -> None:
    """Print two versions' metrics, their recommendations' overlap, and the items whose number of users differs."""
    config = loaded_config.config
    reference_number, version_number, comparison = compare_versions(
        config, version=version, reference=reference, num_users=num_users, k=k
    )
    client = connect(config.workspace)
    all_releases = call_with_deadline(lambda: list_releases(client, config.registry.model_name), uri=client.tracking_uri)
    metrics_by_version: dict[str, Any] = {str(release["version"]): release["metrics"] for release in all_releases}
    reference_metrics, version_metrics = metrics_by_version[reference_number], metrics_by_version[version_number]
    metric_pairs = {
        name: (reference_metrics.get(name), version_metrics.get(name)) for name in {**reference_metrics, **version_metrics}
    }
    metric_pairs = {name: values for name, values in metric_pairs.items() if name.startswith(("served/", "exact_", "index/"))}
    if as_json:
        output.print_json(
            json.dumps(
                {
                    "versions": [reference_number, version_number],
                    "metrics": metric_pairs,
                    "recommendations": comparison.model_dump(),
                }
            )
        )
        return
    output.print_line(f"version {version_number}, compared with version {reference_number}")
    output.print_table(
        ["metric", f"version {reference_number}", f"version {version_number}", "difference"],
        [
            [
                name,
                format_metric(reference_value),
                format_metric(version_value),
                "-" if None in (reference_value, version_value) else f"{version_value - reference_value:+z.4f}",
            ]
            for name, (reference_value, version_value) in metric_pairs.items()
        ],
    )
    output.print_line(
        f"\n{comparison.num_users:,} users: {100 * comparison.mean_overlap:.1f} % of the top {comparison.k} are the same "
        f"items; {comparison.num_equal_lists:,} users have equal lists"
    )
    if comparison.movers:
        has_titles = any(mover.title is not None for mover in comparison.movers)
        rows = [
            [
                *([mover.title or "-"] if has_titles else []),
                str(mover.item_id),
                f"{mover.num_users_before:,}",
                f"{mover.num_users_after:,}",
            ]
            for mover in comparison.movers
        ]
        column_titles = [
            *(["title"] if has_titles else []),
            "item",
            f"users of version {reference_number}",
            f"users of version {version_number}",
        ]
        output.print_table(column_titles, rows)


def change_champion(
    loaded_config: LoadedConfig, command: Literal["promote", "rollback", "refresh"], parameters: Mapping[str, Any]
) -> None:
    """Run the flow `command` and print its result.

    If PREFECT_API_URL is set, the Prefect server at this address records the flow run and its event. Otherwise the function of
    the flow runs without a Prefect server, so that an urgent rollback does not depend on Prefect.
    """
    start_s = time.perf_counter()
    with (
        interruptible(lambda: f"look at the aliases with: {command_line('releases', loaded_config)}"),
        one_sentence_errors(loaded_config.config.workspace),
        output.printed_stages(),
    ):
        with fast_imports():
            from flows import champion, prefect_runs, refresh  # imports Prefect; `interruptible` already handles signals

        flow: Any = {"promote": champion.promote, "rollback": champion.rollback, "refresh": refresh.refresh}[command]
        flow_parameters = {**loaded_config.flow_parameters, **parameters}
        if os.environ.get("PREFECT_API_URL"):
            with prefect_runs.prefect_client():  # raises InputError if the server does not answer
                final_state = flow(**flow_parameters, return_state=True)
        else:
            final_state = flow.fn(**flow_parameters)
        if final_state.is_failed():
            final_state.result()  # raises the error of the flow
    output.print_labelled(
        {
            "result": str(final_state.message),
            "duration": f"{time.perf_counter() - start_s:,.1f} s",
            "versions": command_line("releases", loaded_config),
        }
    )


def push(config: PipelineConfig, *, version: int | None) -> None:
    """Push a version to the vector stores of the config, and print one line per store.

    Raises:
        StageError: a store did not get the version.
    """
    with one_sentence_errors(config.workspace), output.printed_stages():
        results, alarms = push_version(config, version="champion" if version is None else str(version))
    for result in results:
        output.print_line(str(result))
    if alarms:
        raise StageError("\n".join(alarms))


def clean_workspace(config: PipelineConfig, *, dry_run: bool) -> Removals:
    """Remove files and versions that `config.retention` does not keep; with `dry_run`, only return the removals.

    Raises:
        InputError: another command is using the workspace.
        TrackingServerError: MLflow does not answer; nothing is removed.
    """
    with nullcontext() if dry_run else Workspace(config.workspace).lock(run_id="clean"):
        return clean(config.workspace, config.retention, model_name=config.registry.model_name, dry_run=dry_run)


def print_removals(removals: Removals, *, dry_run: bool) -> None:
    """Print one row per run and version, and the total."""
    run_rows = [
        [removal.run_id, "folder" if removal.action == "remove" else "all but reports"] for removal in removals.run_removals
    ]
    version_rows = [[version.tags[RUN_ID_TAG], f"{version.name} version {version.version}"] for version in removals.versions]
    if not run_rows and not version_rows:
        output.print_line("Nothing to remove.")
        return
    output.print_table(["run", "to remove" if dry_run else "removed"], run_rows + version_rows, left_columns=(0, 1))
    summary = f"files of {len(run_rows)} runs and {len(version_rows)} model versions"
    if dry_run:
        output.print_line(f"{summary}; remove them with the same command without --dry-run")
    else:
        output.print_line(f"removed {summary}: {format_gib(removals.freed_bytes, digits=3)}")
