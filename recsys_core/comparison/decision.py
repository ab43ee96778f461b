"""Decision about a new version, from comparisons with the champion, with baselines, and on slices of the users and items.

Several versions in a row may be better than the champion, but each by too little to be promoted. The product of their e-values
(`e_value`) then shows that the champion is worse.
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
"""Product of e-values that raises an alarm. For a champion that is not worse, the probability of an alarm is at most 1/20."""
MAX_LOG_E_VALUE = 300.0
"""Largest exponent of an e-value, which prevents an overflow. It is far above any threshold."""


class Evidence(Frozen):
    """One comparison behind a decision.

    Attributes:
        subject: what is compared, such as recall@20 or recall@20 of tail items.
        baseline: what it is compared with, such as version 3 or popularity.
        is_guardrail: whether the comparison can only prevent a promotion. A guardrail with too few users does not prevent it.
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
    """Return the verdict and its reasons, the most important first.

    A version is promoted if all comparisons are accepted, apart from guardrails with too few users. A rejected comparison
    outweighs a comparison with too few users. Guardrails are a reason only if no other comparison is rejected.
    """
    main_evidence = [entry for entry in evidence if not entry.is_guardrail]
    obstacles: tuple[tuple[Sequence[Evidence], Outcome, Verdict], ...] = (
        (main_evidence, "rejected", "not_promoted"),
        (evidence, "rejected", "not_promoted"),
        (main_evidence, "not_enough_data", "not_enough_data"),
    )
    for decisive_evidence, outcome, verdict in obstacles:
        reasons = tuple(entry.sentence for entry in decisive_evidence if entry.comparison.outcome == outcome)
        if reasons:
            return verdict, reasons
    return "promoted", tuple(entry.sentence for entry in main_evidence)


def missing_evidence(evidence: Sequence[Evidence]) -> tuple[str, ...]:
    """Return one sentence that names the guardrails with too few users; no sentence if all guardrails have enough users."""
    guardrails = [entry for entry in evidence if entry.is_guardrail]
    missing_subjects = [guardrail.subject for guardrail in guardrails if guardrail.comparison.outcome == "not_enough_data"]
    if not missing_subjects:
        return ()
    return (f"not enough data for {len(missing_subjects)} of {len(guardrails)} guardrails: {', '.join(missing_subjects)}",)


def write_evidence(evidence: Sequence[Evidence], folder: Path) -> None:
    """Write the comparisons to EVIDENCE_FILE."""
    (folder / EVIDENCE_FILE).write_bytes(_EVIDENCE_ADAPTER.dump_json(tuple(evidence), indent=2))


def read_evidence(folder: Path) -> tuple[Evidence, ...]:
    """Read the file of `write_evidence`."""
    return _EVIDENCE_ADAPTER.validate_json((folder / EVIDENCE_FILE).read_bytes())


_EVIDENCE_ADAPTER = TypeAdapter(tuple[Evidence, ...])


def e_value(num_better_users: int, num_worse_users: int) -> float:
    """Return the e-value of one run: its evidence that the new version is better than the champion.

    Let p be the probability that a user whose metric differs is better off with the new version. The e-value is the mean of 1
    and the likelihood ratio of a uniform mixture of p over (1/2, 1] against p = 1/2. If the new version is not better, p is at
    most 1/2, so the expected e-value is at most 1. The product over any number of runs then exceeds 20 with a probability of
    at most 1/20 (Ville's inequality; Ramdas et al., Game-theoretic statistics and safe anytime-valid inference, 2023).

    num_better_users, num_worse_users: numbers of users whose metric is higher, and lower, with the new version.

    >>> round(e_value(600, 500), 1), round(e_value(50, 50), 2), e_value(0, 100_000)
    (4.1, 0.56, 0.5)
    """
    from scipy.special import betaincc, betaln

    # The likelihood ratio is 2 * integral over p in (1/2, 1] of p^better (1 - p)^worse, divided by (1/2)^(better + worse).
    probability_above_half = float(betaincc(num_better_users + 1, num_worse_users + 1, 0.5))
    if probability_above_half == 0:
        return 0.5
    log_ratio = (
        (num_better_users + num_worse_users + 1) * math.log(2)
        + betaln(num_better_users + 1, num_worse_users + 1)
        + math.log(probability_above_half)
    )
    return 0.5 + 0.5 * math.exp(min(float(log_ratio), MAX_LOG_E_VALUE))
