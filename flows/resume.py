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
    config_names, run_names = _names(config.model_dump(include={"name": True, "registry": {"model_name"}})), _names(_read(run))
    for setting, config_name in config_names.items():
        if run_names[setting] not in (None, config_name):
            raise InputError(
                f"cannot resume {run.run_id}: {run.config_file} has {setting} {shown(run_names[setting])}, but this config has "
                f"{setting} {shown(config_name)}; resume the run with the config of its own pipeline, or start a new run"
            )


def _read(run: Run) -> Any:
    try:
        return yaml_loader.load(run.config_file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, YAMLError, yaml_loader.TooLargeError) as error:
        raise InputError(f"cannot resume {run.run_id}: {run.config_file} cannot be read: {error}; start a new run") from None


def _names(settings: Any) -> dict[str, Any]:
    """Return the settings that identify a pipeline; None for a setting that is missing."""
    top_level_settings = settings if isinstance(settings, dict) else {}
    registry = top_level_settings.get("registry")
    return {
        "name": top_level_settings.get("name"),
        "registry.model_name": registry.get("model_name") if isinstance(registry, dict) else None,
    }
