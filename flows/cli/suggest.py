"""`nightjar suggest`: settings that fit the data, each with its reason."""

import json

from flows.cli import output
from flows.cli.experiments import as_overrides
from flows.settings.config_file import LoadedConfig, setting_value, settings_as_yaml, with_settings
from tasks.runs.context import StageContext
from tasks.runs.run import Run
from tasks.stages.data_stages import ingest
from tasks.tuning.config import format_setting_value
from tasks.tuning.suggestions import DataFacts, Suggestion, suggestions


def suggest(loaded: LoadedConfig, *, as_json: bool) -> None:
    """Ingest the data and print the settings that fit it. The data is kept in <workspace>/tuning, for `nightjar tune`."""
    config = loaded.config
    run = Run("data", workspace=config.workspace.absolute(), parent="tuning")
    with run.lock(), output.stage_lines():
        facts = DataFacts.of(ingest(StageContext(run), config.inputs))
    suggested = list(suggestions(facts))
    changed = {item.setting: item.value for item in suggested if setting_value(config, item.setting) != item.value}
    with_settings(config, changed)  # raises InputError if they contradict a setting of the file
    if as_json:
        content = {"facts": facts.model_dump(), "suggestions": [item.model_dump() for item in suggested], "changed": changed}
        output.print_json(json.dumps(content))
        return
    output.print_facts(
        {
            "data": f"{facts.num_train_events:,} training events, {facts.num_users:,} users, {facts.num_items:,} items",
            "density": f"{100 * facts.density:.2g} % of all pairs",
            "histories": f"median {facts.history_median:,.0f}, 95 % have at most {facts.history_p95:,.0f} events",
            "cold": f"{facts.cold_share:.1%} of the held-out events are of items without a training event",
        }
    )
    output.stdout.print()
    rows = [_row(loaded, item) for item in suggested]
    output.print_table(["setting", "now", "suggested", "why"], rows, left_columns=(0, 3))
    if not changed:
        output.print_line("\nThe file has all suggested settings.")
        return
    output.stdout.print("\n[bold]The changes[/], for your file")
    output.print_line(settings_as_yaml(config, changed))
    output.print_facts(
        {
            "run": f"nightjar run {loaded.path} {as_overrides(changed)}",
            "tune": f"nightjar tune {loaded.path} --minutes 60 {as_overrides(changed)}",
        }
    )


def _row(loaded: LoadedConfig, item: Suggestion) -> list[str]:
    now = setting_value(loaded.config, item.setting)
    mark = "" if now == item.value else " *"
    return [item.setting, format_setting_value(now), f"{format_setting_value(item.value)}{mark}", item.reason]
