"""How glibc hands memory back, on ranks that train on a CPU.

By default it returns what a step has freed to the kernel, and the next step's tensors are zeroed page by page again.
"""

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST_ON_HEAP = 32 << 20
"""More than this glibc always maps and unmaps."""
KEPT = (1 << 31) - 1


def keep_freed_memory() -> bool:
    """Keeps up to 2 GiB of freed memory in this process; whether the C library could be told so."""
    library = ctypes.CDLL(None)
    if sys.platform != "linux" or not hasattr(library, "mallopt"):
        return False
    return bool(library.mallopt(M_MMAP_THRESHOLD, LARGEST_ON_HEAP)) and bool(library.mallopt(M_TRIM_THRESHOLD, KEPT))
