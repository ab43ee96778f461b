"""Whether FBGEMM sees the CPU's features, in fresh processes: the patch has to come before torch."""

import subprocess
import sys

import pytest
import torch

if not torch.cpu._is_avx2_supported():
    pytest.skip("nothing to see without AVX2", allow_module_level=True)

SEEN = """
import ctypes, pathlib, fbgemm_gpu, torch
library = ctypes.CDLL(str(pathlib.Path(fbgemm_gpu.__file__).with_name("fbgemm.so")))
library.cpuinfo_initialize()
has_avx2 = library._ZN6fbgemm20fbgemmHasAvx2SupportEv
has_avx2.restype = ctypes.c_bool
print(has_avx2())
"""
PATCH = "from recsys_core.patches.cpu_features import share_cpu_features; share_cpu_features()"


def sees_avx2(*, patched: bool) -> bool:
    script = PATCH + SEEN if patched else SEEN
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=True)
    return run.stdout.split()[-1] == "True"


def test_fbgemm_sees_the_features_of_the_cpu() -> None:
    assert sees_avx2(patched=True)


@pytest.mark.skipif(torch.version.cuda is None, reason="seen in the build of torch with CUDA, the one on PyPI")
def test_the_patch_can_go_when_fbgemm_sees_them_without_it() -> None:
    assert not sees_avx2(patched=False)


def test_a_rank_shares_them_before_it_imports_torch() -> None:
    script = "import sys, recsys_core.training.__main__; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False"]
