"""One copy of cpuinfo for torch and FBGEMM, loaded before either is imported.

torch 2.14.1 exports cpuinfo from libc10.so and from libtorch.so, and initialises the copy in libtorch.so. FBGEMM reads the copy
in libc10.so, finds no AVX, and selects its slow reference kernels. The backward pass of 27,740 rows x 64 with row-wise Adagrad
then takes 24 ms instead of 4 ms. pytorch/pytorch#166703 reports the same fault for libtorch_cpu.so, and
pytorch/pytorch#167328 fixes it for that library.
"""

import ctypes
import importlib.util
from pathlib import Path


def libc10_path() -> Path:
    """Return the path of torch's libc10.so without importing torch."""
    torch_spec = importlib.util.find_spec("torch")
    assert torch_spec is not None and torch_spec.origin is not None
    return Path(torch_spec.origin).with_name("lib") / "libc10.so"


def share_cpu_features() -> None:
    """Load libc10.so with global symbols, so that all libraries use its copy. Call this before torch is imported."""
    ctypes.CDLL(str(libc10_path()), mode=ctypes.RTLD_GLOBAL)
