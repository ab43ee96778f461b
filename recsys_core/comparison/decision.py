"""Decision about a new version, from comparisons with the champion, with baselines, and on slices of the users and items.

`e_value` watches several runs: it is evidence that the champion loses to versions that were not promoted.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from recsys_core.comparison.rules import Comparison, Outcome
from recsys_core.config import Frozen

Verdict = Literal["promoted", "not_promoted", "not_enough_data"]
EVIDENCE_FILE = "evidence.json"
ALARM_E_VALUE = 20.0
"""Product of e-values that raises an alarm. A champion that does not lose raises it with a probability of at most 1/20."""
MAX_LOG_E_VALUE = 300.0
"""Limit of the exponent, far above any threshold."""


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
    missing_subjects = [item.subject for item in guardrails if item.comparison.outcome == "not_enough_data"]
    if not missing_subjects:
        return ()
    return (f"not enough data for {len(missing_subjects)} of {len(guardrails)} guardrails: {', '.join(missing_subjects)}",)


def write_evidence(evidence: Sequence[Evidence], folder: Path) -> None:
    """Write the comparisons to EVIDENCE_FILE."""
    (folder / EVIDENCE_FILE).write_bytes(_EVIDENCE.dump_json(tuple(evidence), indent=2))


def read_evidence(folder: Path) -> tuple[Evidence, ...]:
    """Read the file of `write_evidence`."""
    return _EVIDENCE.validate_json((folder / EVIDENCE_FILE).read_bytes())


_EVIDENCE = TypeAdapter(tuple[Evidence, ...])


def e_value(num_better: int, num_worse: int) -> float:
    """Return the evidence of one run that the new version is better than the champion for more users than it is worse for.

    If it is not, a user whose metric differs is better off with a probability of at most 1/2. The e-value is half 1 and half
    the likelihood ratio of a uniform mixture over (1/2, 1] against 1/2. Its expectation is then at most 1, so the product over
    runs exceeds 20 with a probability of at most 1/20, however many runs are watched (Ville's inequality; Ramdas et al.,
    Game-theoretic statistics and safe anytime-valid inference, 2023).

    >>> round(e_value(600, 500), 1), round(e_value(50, 50), 2), e_value(0, 100_000)
    (4.1, 0.56, 0.5)
    """
    from scipy.special import betaincc, betaln

    # 2 * integral over p in (1/2, 1] of p^better (1 - p)^worse, divided by (1/2)^(better + worse)
    share_above_half = float(betaincc(num_better + 1, num_worse + 1, 0.5))
    if share_above_half == 0:
        return 0.5
    log_ratio = (num_better + num_worse + 1) * math.log(2) + betaln(num_better + 1, num_worse + 1) + math.log(share_above_half)
    return 0.5 + 0.5 * math.exp(min(float(log_ratio), MAX_LOG_E_VALUE))
