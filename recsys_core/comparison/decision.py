"""Decision about a new version, from comparisons with the champion, with baselines, and on slices of the users and items."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from recsys_core.comparison.rules import Comparison, Outcome
from recsys_core.config import Frozen

Verdict = Literal["promoted", "not_promoted", "not_enough_data"]
EVIDENCE_FILE = "evidence.json"


class Evidence(Frozen):
    """One comparison behind a decision.

    Attributes:
        subject: what is compared, such as recall@20 or recall@20 of tail items.
        baseline: what it is compared with, such as version 3 or popularity.
        is_guardrail: whether the comparison can only prevent a promotion. A guardrail with too few users prevents none.
    """

    subject: str
    baseline: str
    is_guardrail: bool = False
    comparison: Comparison

    @property
    def sentence(self) -> str:
        """The subject and the reason of the comparison."""
        return f"{self.subject} is {self.comparison.reason}"


def decide(evidence: Sequence[Evidence]) -> tuple[Verdict, tuple[str, ...]]:
    """Return the verdict and its reasons, the most important one first.

    A version is promoted if all comparisons are accepted, apart from guardrails with too few users. A rejected comparison
    outweighs a comparison with too few users, and guardrails are a reason only if no other comparison is rejected.
    """
    main = [item for item in evidence if not item.is_guardrail]
    cases: tuple[tuple[Sequence[Evidence], Outcome, Verdict], ...] = (
        (main, "rejected", "not_promoted"),
        (evidence, "rejected", "not_promoted"),
        (main, "not_enough_data", "not_enough_data"),
    )
    for items, outcome, verdict in cases:
        reasons = tuple(item.sentence for item in items if item.comparison.outcome == outcome)
        if reasons:
            return verdict, reasons
    return "promoted", tuple(item.sentence for item in main)


def missing_evidence(evidence: Sequence[Evidence]) -> tuple[str, ...]:
    """Return a sentence that names the guardrails with too few users; empty if all guardrails have enough."""
    guardrails = [item for item in evidence if item.is_guardrail]
    missing = [item.subject for item in guardrails if item.comparison.outcome == "not_enough_data"]
    if not missing:
        return ()
    return (f"not enough data for {len(missing)} of {len(guardrails)} guardrails: {', '.join(missing)}",)


def write_evidence(evidence: Sequence[Evidence], folder: Path) -> None:
    """Write the comparisons to EVIDENCE_FILE."""
    (folder / EVIDENCE_FILE).write_bytes(_EVIDENCE.dump_json(tuple(evidence), indent=2))


def read_evidence(folder: Path) -> tuple[Evidence, ...]:
    """Read the file of `write_evidence`."""
    return _EVIDENCE.validate_json((folder / EVIDENCE_FILE).read_bytes())


_EVIDENCE = TypeAdapter(tuple[Evidence, ...])
