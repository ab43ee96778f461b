"""The automations of one pipeline, made from infra/automations; tests/drills/test_automations.py runs them on a server."""

from datetime import timedelta
from typing import Any, get_args
from uuid import UUID, uuid4

import pytest
from prefect.client.schemas.objects import BlockDocument, BlockSchema, BlockType
from prefect.events.actions import CallWebhook, SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger
from ruamel.yaml import YAML

from flows.scheduled.automations import AUTOMATION_FOLDER, automation_of
from flows.settings.schedule import ScheduleConfig
from flows.settings.template import starter_config
from tasks.runs.run_record import RunState

AUTOMATION_PATHS = sorted(AUTOMATION_FOLDER.glob("*.yaml"))
DEPLOYMENT_ID = uuid4()
CONFIG = starter_config().model_copy(update={"name": "films", "schedule": ScheduleConfig(deadline_minutes=90)})


def block(slug: str, *capabilities: str) -> BlockDocument:
    """Return a Prefect block of the type `slug`."""
    return BlockDocument(
        name="nightjar-alerts",
        block_type=BlockType(name=slug, slug=slug),
        block_type_id=uuid4(),
        block_schema=BlockSchema(checksum="", fields={}, block_type_id=uuid4(), capabilities=list(capabilities)),
        block_schema_id=uuid4(),
    )


def automations(block_document: BlockDocument) -> dict[str, AutomationCore]:
    """Return the automations that send to a block, by the file name without its ending."""
    return {
        automation_path.stem: automation_of(automation_path, CONFIG, deployment_id=DEPLOYMENT_ID, block=block_document)
        for automation_path in AUTOMATION_PATHS
    }


def event_trigger(automation: AutomationCore) -> EventTrigger:
    assert isinstance(automation.trigger, EventTrigger)
    return automation.trigger


def match_of(specification: Any) -> dict[str, Any]:
    return dict(specification.root)


@pytest.mark.parametrize("automation_path", AUTOMATION_PATHS, ids=lambda automation_path: automation_path.stem)
def test_each_file_is_also_an_automation_for_prefects_own_command(automation_path: Any) -> None:
    automation = AutomationCore.model_validate(YAML(typ="safe", pure=True).load(automation_path.read_text()))
    assert [action.block_document_id for action in automation.actions if isinstance(action, CallWebhook)] == [UUID(int=0)]


def test_automations_watch_the_deployment_or_the_model_of_their_pipeline() -> None:
    webhook = block("webhook")
    for stem, automation in automations(webhook).items():
        trigger = event_trigger(automation)
        if stem == "champion-changed":
            assert match_of(trigger.match) == {"prefect.resource.id": f"nightjar.model.{CONFIG.registry.model_name}"}
        else:
            assert match_of(trigger.match_related)["prefect.resource.id"] == f"prefect.deployment.{DEPLOYMENT_ID}"
        assert automation.name.startswith("films: ")
        assert [action.block_document_id for action in automation.actions] == [webhook.id]


def test_a_notification_block_gets_a_subject_and_a_text() -> None:
    (action,) = automations(block("sendgrid-email", "notify"))["run-failed"].actions
    assert isinstance(action, SendNotification)
    assert action.subject == "films: run failed"
    assert action.body.startswith("{{ (automation.name ~ ") and action.body.endswith("(flow_run | ui_url)) }}")


def test_a_run_that_has_ended_is_not_an_overrun_and_the_config_sets_the_deadline() -> None:
    trigger = event_trigger(automations(block("webhook"))["overran"])
    end_states = set(get_args(RunState)) - {"Running", "Interrupted"} | {"Cancelled", "Crashed", "Completed"}
    assert {f"prefect.flow-run.{state}" for state in end_states} <= trigger.expect
    assert trigger.within.total_seconds() == 90 * 60


def test_the_limits_without_a_deadline_are_the_documented_limits() -> None:
    config = CONFIG.model_copy(update={"schedule": ScheduleConfig()})
    trigger_by_stem = {
        path.stem: event_trigger(automation_of(path, config, deployment_id=DEPLOYMENT_ID, block=block("webhook")))
        for path in AUTOMATION_PATHS
    }
    assert trigger_by_stem["overran"].within == timedelta(hours=4)
    assert trigger_by_stem["did-not-start"].within == timedelta(minutes=10)
    assert (trigger_by_stem["not-promoted"].threshold, trigger_by_stem["not-promoted"].within) == (3, timedelta(hours=60))


def test_an_alert_is_sent_for_each_end_state_that_needs_a_person() -> None:
    failed_states = {"Failed", "Crashed", "DataRejected", "BrokenChampion", "TimedOut"}
    expected_events = {f"prefect.flow-run.{state}" for state in failed_states}
    assert event_trigger(automations(block("webhook"))["run-failed"]).expect == expected_events
