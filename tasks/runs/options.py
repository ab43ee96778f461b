"""Options of one run, which are not part of the config."""

from dataclasses import dataclass
from typing import Literal, get_args

from recsys_core.errors import InputError, shown

Promote = Literal["by_gate", "never", "force"]
"""by_gate: the comparison with the champion decides. never: the champion stays. force: the new version becomes champion."""
MAX_REASON_CHARACTERS = 200


def check_reason(reason: str) -> None:
    """Raise InputError unless `reason` is one printable line of at most MAX_REASON_CHARACTERS characters."""
    if len(reason) > MAX_REASON_CHARACTERS or not reason.isprintable():
        raise InputError(
            f"reason {shown(reason)}: a reason is one line of at most {MAX_REASON_CHARACTERS} characters, but this one has "
            f"{len(reason)} characters, or a control character such as a line break; change it"
        )


@dataclass(frozen=True)
class RunOptions:
    """Options of one run, which are not part of the config.

    Attributes:
        reason: why the run was started; empty for a scheduled run. It becomes a tag of the run in Prefect and MLflow.
        full_retrain: build the vocabularies again, read all input files and train from scratch.
        dry_run: execute all stages, but register no version.
        promote: rule that decides whether the new version becomes champion. `force` needs a reason, and the version must still
            pass the smoke test.
    """

    reason: str = ""
    full_retrain: bool = False
    dry_run: bool = False
    promote: Promote = "by_gate"

    def __post_init__(self) -> None:
        """Raise InputError for options that are invalid or contradict each other."""
        check_reason(self.reason)
        if self.promote not in get_args(Promote):
            raise InputError(f"promote is {shown(self.promote)}; set it to one of {', '.join(get_args(Promote))}")
        if self.promote == "force" and not self.reason.strip():
            raise InputError("promote is force, but there is no reason; give a reason, which is recorded on the new version")
        if self.promote == "force" and self.dry_run:
            raise InputError("promote is force, but a dry run registers no version; drop one of the two options")
