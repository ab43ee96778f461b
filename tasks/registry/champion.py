"""Which run's model a night starts from: the champion's, as it was when the night began to train."""

import json
from pathlib import Path

from recsys_core.errors import TrackingServerError
from recsys_core.training.champion import Champion
from tasks.registry.mlflow_client import ANSWER_TIMEOUT_S, LOG, RUN_ID_TAG, connect, tracking_uri, within
from tasks.registry.releases import champion_of
from tasks.run import Run

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
    """The champion's run; None with a warning where MLflow does not answer in time: the night then trains from scratch."""

    try:
        client = connect(run.workspace)
        version = within(ANSWER_TIMEOUT_S, lambda: champion_of(client, model_name), uri=tracking_uri(run.workspace))
    except TrackingServerError as error:
        LOG.warning("the champion is not known: %s", error)
        return None
    return None if version is None else version.tags.get(RUN_ID_TAG)


def _write(path: Path, content: dict[str, str | None]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_suffix(".tmp")
    staging.write_text(json.dumps(content))
    staging.replace(path)
