"""The check before a run is resumed: the run exists and belongs to the pipeline of the config."""

from typing import Any

from yaml import YAMLError

from flows import yaml_loader
from flows.config import PipelineConfig
from recsys_core.errors import InputError, shown
from tasks.run import Run


def check_resume(config: PipelineConfig, run: Run) -> None:
    """Raise InputError if `run` does not exist, or if its config.yaml names another pipeline or registered model."""
    if not run.config_file.is_file():
        run_ids = sorted(path.name for path in run.folder.parent.glob("*") if path.is_dir())
        raise InputError(
            f"cannot resume {run.run_id}: no such run in {run.folder.parent}; the runs are {', '.join(run_ids) or 'none'}"
        )
    config_identity = _pipeline_identity(config.model_dump(include={"name": True, "registry": {"model_name"}}))
    run_identity = _pipeline_identity(_read_run_config(run))
    for setting, config_value in config_identity.items():
        run_value = run_identity[setting]
        if run_value not in (None, config_value):
            raise InputError(
                f"cannot resume {run.run_id}: {run.config_file} has {setting} {shown(run_value)}, but this config has "
                f"{setting} {shown(config_value)}; resume the run with the config of its own pipeline, or start a new run"
            )


def _read_run_config(run: Run) -> Any:
    try:
        return yaml_loader.load(run.config_file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, YAMLError, yaml_loader.TooLargeError) as error:
        raise InputError(f"cannot resume {run.run_id}: {run.config_file} cannot be read: {error}; start a new run") from None


def _pipeline_identity(settings: Any) -> dict[str, Any]:
    """Return the settings that identify a pipeline; None for a setting that is missing."""
    top_level_settings = settings if isinstance(settings, dict) else {}
    registry_settings = top_level_settings.get("registry")
    return {
        "name": top_level_settings.get("name"),
        "registry.model_name": registry_settings.get("model_name") if isinstance(registry_settings, dict) else None,
    }
