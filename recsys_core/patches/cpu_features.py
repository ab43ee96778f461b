"""One copy of cpuinfo for torch and FBGEMM; imports neither, since it has to come before both.

torch 2.14.1 exports cpuinfo from libc10.so and from libtorch.so (pytorch/pytorch#166703 reports the same of libtorch_cpu.so,
where pytorch/pytorch#167328 removed it). It fills the copy of libtorch.so. FBGEMM reads that of libc10.so, finds no AVX, and
takes its reference kernels: the backward pass of 27,740 rows x 64 under row-wise Adagrad takes 24 ms instead of 4.
"""

import ctypes
import importlib.util
from pathlib import Path


def library() -> Path:
    """Where torch's libc10.so is."""
    torch = importlib.util.find_spec("torch")
    assert torch is not None and torch.origin is not None
    return Path(torch.origin).with_name("lib") / "libc10.so"


def share_cpu_features() -> None:
    """Loads libc10.so for the whole process, so that all libraries bind to its copy. Call before torch is imported."""
    ctypes.CDLL(str(library()), mode=ctypes.RTLD_GLOBAL)
