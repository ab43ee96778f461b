"""Watch over several runs: evidence that the champion loses to the versions that were not promoted."""

import math

ALARM_E_VALUE = 20.0
"""Product of e-values that is reported. A champion that does not lose is reported with a probability of at most 1/20."""
MAX_LOG_E_VALUE = 300.0
"""Limit of the exponent, far above any threshold."""


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
