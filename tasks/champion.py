"""Which run's model a night starts from: the champion's, as it was when the night began to train."""

import json
import threading
from pathlib import Path

from recsys_core.training.champion import Champion
from tasks.registry import champion_of
from tasks.run import Run
from tasks.tracking import LOG, PATIENCE_S, RUN_ID_TAG, connect

CHOICE_NAME = "champion.json"


def starting_champion(model_name: str, *, run: Run) -> Champion | None:
    """The champion of `model_name` with what its run left in the workspace; None where a full training has to be.

    The choice is kept in the run's folder: a resumed run starts from the same model, whatever became champion meanwhile.
    """
    choice = run.folder / CHOICE_NAME
    if choice.is_file():
        run_id = json.loads(choice.read_bytes())["run_id"]
    else:
        run_id = _champion_run(model_name, run=run)
        _write(choice, {"run_id": run_id})
    if run_id is None:
        LOG.info("full training: %s has no champion yet, or had none when this run began", model_name)
        return None
    source = Run(run_id, workspace=run.workspace, experiment=run.experiment)
    champion = Champion.open(
        run_id,
        train=source.stage_folder("train"),
        export=source.stage_folder("export"),
        interactions=source.stage_folder("ingest_interactions"),
        features=source.stage_folder("ingest_features"),
    )
    if champion is None:
        LOG.info("full training: the champion is of run %s, of which %s does not have all stages", run_id, source.folder.parent)
    return champion


def _champion_run(model_name: str, *, run: Run) -> str | None:
    """The champion's run; none where the registry does not say so in time, which is warned about: the night goes on."""
    found: list[str | None] = []

    def ask() -> None:
        try:
            version = champion_of(connect(run.workspace), model_name)
            found.append(None if version is None else version.tags.get(RUN_ID_TAG))
        except Exception as error:  # whatever MLflow, its database or the network throws
            LOG.warning("MLflow does not say which version is champion (%s: %s)", type(error).__name__, error)
            found.append(None)

    thread = threading.Thread(target=ask, name="mlflow-champion", daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    if not found:
        LOG.warning("MLflow has not said within %.0f s which version is champion", PATIENCE_S)
    return found[0] if found else None


def _write(path: Path, content: dict[str, str | None]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_suffix(".tmp")
    staging.write_text(json.dumps(content))
    staging.replace(path)
