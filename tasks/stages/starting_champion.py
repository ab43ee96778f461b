"""The champion whose model a warm start continues to train."""

import json
from pathlib import Path

from recsys_core.atomic import write_text
from recsys_core.manifests import ExportManifest, FeaturesManifest, InteractionsManifest, TrainManifest
from recsys_core.training.warm.starting_model import Champion
from tasks.registry.mlflow_client import LOG, RUN_ID_TAG, call_or_warn
from tasks.registry.releases import champion_of
from tasks.runs.run import CHAMPION_FILE_NAME, Run
from tasks.runs.workspace import Workspace


def starting_champion(model_name: str, *, run: Run) -> Champion | None:
    """Return the champion of `model_name` with the stages of its run; None if the run must train from scratch.

    The champion's run id is saved in the run's folder: a resumed run starts from the same model, even if another version
    has become champion in the meantime.
    """
    champion_file = run.folder / CHAMPION_FILE_NAME
    if champion_file.is_file():
        run_id = json.loads(champion_file.read_bytes())["run_id"]
    else:
        version = call_or_warn(
            lambda client: champion_of(client, model_name),
            workspace=run.workspace,
            warning="could not read the champion from MLflow",
        )
        run_id = None if version is None else version.tags.get(RUN_ID_TAG)
        _write_json(champion_file, {"run_id": run_id})
    if run_id is None:
        LOG.info("full training: %s has no champion yet, or had none when this run began", model_name)
        return None
    champion_run = Workspace(run.workspace).run(run_id)
    champion = Champion.open(
        run_id,
        train_folder=champion_run.stage_folder(TrainManifest),
        export_folder=champion_run.stage_folder(ExportManifest),
        interactions_folder=champion_run.stage_folder(InteractionsManifest),
        features_folder=champion_run.stage_folder(FeaturesManifest),
    )
    if champion is None:
        LOG.info(
            "full training: stages of run %s, which trained the champion, are missing in %s", run_id, champion_run.folder.parent
        )
    return champion


def _write_json(path: Path, content: dict[str, str | None]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(content))
