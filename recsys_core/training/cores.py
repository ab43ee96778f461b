"""Which cores a rank runs on."""

import os


def keep_to_own_cores(*, rank: int, ranks: int) -> None:
    """Keeps this process to its share of the host's cores, where there is one for each of its `ranks`.

    A rank's step is a chain of short waits for others: moved between cores by the kernel it finds its caches cold after each.
    """
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // ranks
    if ranks > 1 and each:
        os.sched_setaffinity(0, cores[rank * each : (rank + 1) * each])
