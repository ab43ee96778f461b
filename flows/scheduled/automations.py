"""Prefect automations of a pipeline, created from infra/automations. They react only to runs and the model of this pipeline."""

import re
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import BlockDocument
from prefect.events.actions import CallWebhook, SendNotification
from prefect.events.schemas.automations import AutomationCore
from ruamel.yaml import YAML

from flows.settings.pipeline import PipelineConfig
from recsys_core.errors import InputError

AUTOMATION_FOLDER = Path(__file__).resolve().parents[2] / "infra" / "automations"
BLOCK_NAME = "nightjar-alerts"
"""Name of the Prefect block that delivers the alerts: a webhook, or a notification such as an e-mail."""
_OVERRAN_STEM = "overran"
"""Name, without suffix, of the automation file whose trigger waits for `schedule.deadline_minutes`."""
_MAX_BLOCKS_PER_REQUEST = 200


def create_automations(client: SyncPrefectClient, config: PipelineConfig, *, deployment_id: UUID) -> list[str]:
    """Create the automations of the pipeline, or update existing automations with the same names; return the names.

    An automation that a person has paused stays paused.

    Raises:
        InputError: there is no block `nightjar-alerts`, or the block cannot deliver alerts.
    """
    block = require_alert_block(client)
    automation_paths = sorted(AUTOMATION_FOLDER.glob("*.yaml"))
    if not automation_paths:
        raise InputError(f"{AUTOMATION_FOLDER} contains no automations; install nightjar from a checkout that has this folder")
    automations = [automation_of(path, config, deployment_id=deployment_id, block=block) for path in automation_paths]
    for automation in automations:
        existing_automations = client.read_automations_by_name(automation.name)
        if existing_automations:
            is_enabled = existing_automations[0].enabled
            client.update_automation(existing_automations[0].id, automation.model_copy(update={"enabled": is_enabled}))
        else:
            client.create_automation(automation)
    return [automation.name for automation in automations]


def find_alert_block(client: SyncPrefectClient) -> BlockDocument | None:
    """Return the block `nightjar-alerts`; None if it does not exist."""
    offset, block = 0, None
    while block is None and (
        blocks := client.read_block_documents(offset=offset, limit=_MAX_BLOCKS_PER_REQUEST, include_secrets=False)
    ):
        block = next((document for document in blocks if document.name == BLOCK_NAME), None)
        offset += len(blocks)
    return block


def require_alert_block(client: SyncPrefectClient) -> BlockDocument:
    """Return the block `nightjar-alerts`; raise InputError if it does not exist, or cannot deliver alerts."""
    block = find_alert_block(client)
    if block is None:
        raise InputError(
            f"the Prefect server has no block {BLOCK_NAME}, which delivers the alerts; in its UI under Blocks, create a "
            f"Webhook or a notification such as Sendgrid Email with the name {BLOCK_NAME}"
        )
    capabilities = [] if block.block_schema is None else block.block_schema.capabilities
    if not _is_webhook(block) and "notify" not in capabilities:
        type_slug = "" if block.block_type is None else block.block_type.slug
        raise InputError(
            f"the block {BLOCK_NAME} has the type {type_slug}, which cannot deliver alerts; replace it by a Webhook "
            "or a notification such as Sendgrid Email"
        )
    return block


def automation_of(path: Path, config: PipelineConfig, *, deployment_id: UUID, block: BlockDocument) -> AutomationCore:
    """Return the automation in the file `path`, with its name, trigger and actions set for the pipeline of `config`."""
    automation_fields: dict[str, Any] = YAML(typ="safe", pure=True).load(path)
    trigger: dict[str, Any] = automation_fields["trigger"]
    if "match_related" in trigger:
        trigger["match_related"] = {
            "prefect.resource.role": "deployment",
            "prefect.resource.id": f"prefect.deployment.{deployment_id}",
        }
    else:
        trigger["match"] = {"prefect.resource.id": f"nightjar.model.{config.registry.model_name}"}
    deadline_minutes = config.schedule.deadline_minutes
    if path.stem == _OVERRAN_STEM and deadline_minutes is not None:
        trigger["within"] = timedelta(minutes=deadline_minutes).total_seconds()
    automation_fields["name"] = f"{config.name}: {automation_fields['name']}"
    automation_fields["tags"] = ["nightjar", f"pipeline:{config.name}"]
    automation_fields["actions"] = [
        _alert_action(action["payload"], subject=automation_fields["name"], block=block)
        for action in automation_fields["actions"]
    ]
    return AutomationCore.model_validate(automation_fields)


def _alert_action(payload: str, *, subject: str, block: BlockDocument) -> dict[str, Any]:
    """Return the action that delivers `payload` through `block`: a request to a webhook, or a message with a subject."""
    action = (
        CallWebhook(block_document_id=block.id, payload=payload)
        if _is_webhook(block)
        else SendNotification(block_document_id=block.id, subject=subject, body=_text_template(payload))
    )
    return action.model_dump(mode="json")


def _text_template(payload: str) -> str:
    """Return the template of the field `text` in a JSON payload.

    >>> _text_template('{"text": {{ (flow_run.name ~ " failed") | tojson }}}')
    '{{ (flow_run.name ~ " failed") }}'
    """
    expressions = re.findall(r"\{\{\s*(.*?)\s*\|\s*tojson\s*\}\}", payload, re.DOTALL)
    return "{{ " + expressions[0] + " }}"


def _is_webhook(block: BlockDocument) -> bool:
    return block.block_type is not None and block.block_type.slug == "webhook"
