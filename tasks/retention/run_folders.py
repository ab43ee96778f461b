"""Run folders by age: the newest runs keep all files, older runs keep manifests and reports, the oldest runs are removed.

A run is reduced in two steps: the file reduced.json is written, then the large files are removed. A run folder is removed by a
rename into the workspace's trash, which is emptied afterwards. If the process is killed, the next `nightjar clean` or the end
of the next run finishes the removal.
"""

import json
import logging
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout

from recsys_core.disk import write_text
from recsys_core.manifests import (
    MARKER_NAME,
    STAGES,
    DataReportManifest,
    FeaturesManifest,
    InteractionsManifest,
    ManifestT,
    StageName,
    create_own_folder,
    load_manifest,
)
from recsys_core.manifests.stage_folder import remove_own_folder
from tasks.retention.config import RetentionConfig
from tasks.runs.run import CHAMPION_FILE_NAME, LOCK_NAME, REDUCED_FILE_NAME, REFIT_FOLDER_NAME, RUNS_FOLDER_NAME, Run
from tasks.runs.workspace import Workspace

LOG = logging.getLogger("nightjar")
REPORT_SUFFIXES = (".html", ".json", ".jsonl", ".png")
"""Files of a stage that a reduced run keeps: its manifest, its report and the training log."""
TRASH_FOLDER_NAME = ".trash"


@dataclass(frozen=True)
class RunRemoval:
    """Removal of the large files of one run, or of its whole folder.

    Attributes:
        action: "reduce" removes large files; "remove" removes the folder.
        kept_stages: stages whose files a reduction keeps.
    """

    run_id: str
    action: Literal["reduce", "remove"]
    kept_stages: frozenset[StageName]


def own_runs(workspace: Path) -> list[Run]:
    """Return the runs, the oldest first; links and folders that nightjar did not create are left out."""
    if (workspace / RUNS_FOLDER_NAME).is_symlink():
        LOG.warning("%s: is a link, so retention removes no runs behind it", workspace / RUNS_FOLDER_NAME)
        return []
    return [run for run in Workspace(workspace).runs() if (run.folder / MARKER_NAME).is_file()]


def find_removals(workspace: Path, config: RetentionConfig, *, aliased_run_ids: Collection[str]) -> list[RunRemoval]:
    """Return the removals after which the runs of `workspace` comply with `config`, the oldest run first. Remove nothing.

    Args:
        aliased_run_ids: ids of the runs whose model version has an alias; these runs keep all files.
    """
    runs = own_runs(workspace)
    kept_stages_by_run = _find_kept_stages(runs, config, aliased_run_ids=aliased_run_ids)
    removals: list[RunRemoval] = []
    for index, run in enumerate(runs):
        kept_stages = kept_stages_by_run.get(run.run_id, frozenset())
        if index < len(runs) - config.keep_report_runs and not kept_stages:
            removals.append(RunRemoval(run.run_id, "remove", kept_stages))
        elif any(_large_files(run.folder, kept_stages=kept_stages)):
            removals.append(RunRemoval(run.run_id, "reduce", kept_stages))
    return removals


def _find_kept_stages(
    runs: list[Run], config: RetentionConfig, *, aliased_run_ids: Collection[str]
) -> dict[str, frozenset[StageName]]:
    """Return the stages whose files must all be kept, by run id.

    All stages are kept for the newest `config.keep_full_runs` runs, for locked runs, and for runs whose model version has an
    alias. If a newest or locked run trains from the model of an earlier run, all stages of the earlier run are kept too.

    Another run keeps its interactions, features or data report if a new run, or the resume of a newest or locked run, reads
    them. Without these files, a resumed run would repeat its stages, and a new run would build its vocabulary again.
    """
    newest_or_locked_runs = [*runs[-config.keep_full_runs :], *(run for run in runs if run.is_locked())]
    warm_start_run_ids = filter(None, (_warm_start_run_id(run.folder) for run in newest_or_locked_runs))
    kept_stages_by_run = dict.fromkeys(
        [*(run.run_id for run in newest_or_locked_runs), *warm_start_run_ids, *aliased_run_ids], frozenset(STAGES)
    )
    # A resume of one of the newest or locked runs reads stages of earlier runs. A new run may read stages of all runs.
    for num_earlier_runs in {*(runs.index(run) for run in newest_or_locked_runs), len(runs)}:
        for run_id, stage in _stages_read_by_next(runs[:num_earlier_runs]):
            kept_stages_by_run[run_id] = kept_stages_by_run.get(run_id, frozenset()) | {stage}
    return kept_stages_by_run


def _stages_read_by_next(earlier_runs: list[Run]) -> Iterator[tuple[str, StageName]]:
    """Yield run id and stage for each stage of `earlier_runs` that the next run reads with `StageContext.previous_manifest`."""

    def newest_run_id(manifest_type: type[ManifestT], *, where: Callable[[ManifestT], bool] = lambda _: True) -> str | None:
        for run in reversed(earlier_runs):
            manifest = load_manifest(run.stage_folder(manifest_type), manifest_type, verify=False)
            if manifest is not None and where(manifest):
                return run.run_id
        return None

    if (run_id := newest_run_id(InteractionsManifest)) is not None:
        yield run_id, "ingest_interactions"
    if (run_id := newest_run_id(FeaturesManifest)) is not None:
        yield run_id, "ingest_features"
    if (run_id := newest_run_id(DataReportManifest, where=lambda report: not report.breaches)) is not None:
        yield run_id, "check_data"
        yield run_id, "ingest_interactions"  # the next data report compares its events with the events of this run


def _warm_start_run_id(folder: Path) -> str | None:
    """Return the id of the run whose model is the start of the training in `folder`; None for a training from scratch."""
    try:
        run_id = json.loads((folder / CHAMPION_FILE_NAME).read_bytes())["run_id"]
        return None if run_id is None else str(run_id)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _large_files(folder: Path, *, kept_stages: Collection[StageName]) -> Iterator[Path]:
    """Yield the files and folders that a reduced run does not keep.

    Links are not followed. A stage folder without the marker is left alone, because nightjar did not create its files.
    """
    refit_folder = folder / REFIT_FOLDER_NAME
    if not kept_stages and _is_real_folder(refit_folder) and (refit_folder / MARKER_NAME).is_file():
        yield refit_folder  # left by a refit that did not end
    for stage in STAGES:
        if stage in kept_stages:
            continue
        yield from (path for path in (folder / f"{stage}.work", folder / f"{stage}.tmp") if _is_real_folder(path))
        stage_folder = folder / stage
        if _is_real_folder(stage_folder) and (stage_folder / MARKER_NAME).is_file():
            for path in sorted(stage_folder.iterdir()):
                if path.is_dir() or (path.suffix not in REPORT_SUFFIXES and path.name != MARKER_NAME):
                    yield path


def _is_real_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def remove_files(workspace: Path, removals: Iterable[RunRemoval]) -> list[RunRemoval]:
    """Remove the files, except files of a run on which a process works; return the completed removals.

    Files that cannot be removed, such as files of another user, are reported in the log.
    """
    completed_removals, trash_folder = [], workspace / TRASH_FOLDER_NAME
    for removal in removals:
        folder = workspace / RUNS_FOLDER_NAME / removal.run_id
        if not (folder / MARKER_NAME).is_file():  # another process has removed the run
            continue
        try:
            with FileLock(folder / LOCK_NAME, timeout=0):
                if not (folder / MARKER_NAME).is_file():
                    # Another process has just removed the run, and FileLock has created the folder again.
                    (folder / LOCK_NAME).unlink()
                    folder.rmdir()
                    continue
                if removal.action == "remove":
                    create_own_folder(trash_folder)
                    folder.rename(trash_folder / f"{folder.name}.{secrets.token_hex(4)}")
                else:
                    _reduce_run(folder, kept_stages=removal.kept_stages)
        except (Timeout, FileNotFoundError):  # another process works on the run
            continue
        except OSError as error:
            LOG.warning("%s: cannot be cleaned (%s); check the owner and the permissions of its files", folder, error)
            continue
        completed_removals.append(removal)
    try:
        remove_own_folder(trash_folder)  # also removes folders that a killed process has moved there
    except OSError as error:
        LOG.warning("%s: cannot be emptied (%s); check the owner and the permissions of its files", trash_folder, error)
    return completed_removals


def _reduce_run(folder: Path, *, kept_stages: Collection[StageName]) -> None:
    if not (folder / REDUCED_FILE_NAME).exists():
        try:
            write_text(folder / REDUCED_FILE_NAME, json.dumps({"reduced_at": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"}))
        except OSError:  # a full disk still has room for an empty file
            (folder / REDUCED_FILE_NAME).touch()
    for path in _large_files(folder, kept_stages=kept_stages):
        if _is_real_folder(path):
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
