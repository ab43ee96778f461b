"""`nightjar clean`: remove old runs and model versions, or list them."""

from rich.console import Console

from flows.cli import output
from flows.config import PipelineConfig
from recsys_core.units import format_gib
from tasks.retention.clean import Removals, clean, find_all_removals, open_registry
from tasks.run import workspace_lock


def clean_workspace(config: PipelineConfig, *, dry_run: bool) -> Removals:
    """Remove files and versions that `config.retention` does not keep; with `dry_run`, only return the removals.

    Raises:
        InputError: another command is using the workspace.
        TrackingServerError: MLflow does not answer; nothing is removed.
    """
    if dry_run:
        return find_all_removals(
            config.workspace, config.retention, model_name=config.registry.model_name, client=open_registry(config.workspace)
        )
    with workspace_lock(config.workspace, run_id="clean"):
        return clean(config.workspace, config.retention, model_name=config.registry.model_name)


def print_removals(removals: Removals, *, dry_run: bool, console: Console) -> None:
    """Print one row per run and version, and the total."""
    rows = [
        [removal.run_id, "folder" if removal.action == "remove" else "all but reports", f"{removal.bytes:,}"]
        for removal in removals.run_removals
    ]
    rows += [
        [removal.run_id, f"{removal.model_name} version {removal.version}", f"{removal.bytes:,}" if removal.bytes else "-"]
        for removal in removals.version_removals
    ]
    if rows:
        output.print_table(["run", "to remove" if dry_run else "removed", "bytes"], rows, console=console)
    num_runs, num_versions = len(removals.run_removals), len(removals.version_removals)
    summary = f"{format_gib(removals.bytes, digits=3)} in {num_runs} runs and {num_versions} model versions"
    if not rows:
        console.print("Nothing to remove.")
    elif dry_run:
        console.print(f"{summary}; remove them with the same command without --dry-run", soft_wrap=True)
    else:
        console.print(f"removed {summary}", soft_wrap=True)
