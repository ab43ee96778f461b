"""CPU features that FBGEMM detects. Each test starts a process, because the patch must run before torch is imported."""

import subprocess
import sys

import pytest
import torch

if not torch.cpu._is_avx2_supported():
    pytest.skip("this CPU has no AVX2", allow_module_level=True)

AVX2_SCRIPT = """
import ctypes, pathlib, fbgemm_gpu, torch
library = ctypes.CDLL(str(pathlib.Path(fbgemm_gpu.__file__).with_name("fbgemm.so")))
library.cpuinfo_initialize()
has_avx2 = library._ZN6fbgemm20fbgemmHasAvx2SupportEv  # fbgemm::fbgemmHasAvx2Support()
has_avx2.restype = ctypes.c_bool
print(has_avx2())
"""
PATCH_SCRIPT = "from recsys_core.patches.cpu_features import share_cpu_features; share_cpu_features()"


def detects_avx2(*, is_patched: bool) -> bool:
    script = PATCH_SCRIPT + AVX2_SCRIPT if is_patched else AVX2_SCRIPT
    completed_process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=True
    )
    return completed_process.stdout.split()[-1] == "True"


def test_fbgemm_detects_avx2_with_the_patch() -> None:
    assert detects_avx2(is_patched=True)


@pytest.mark.skipif(torch.version.cuda is None, reason="only the CUDA build of torch, the one on PyPI, needs the patch")
def test_without_the_patch_fbgemm_does_not_detect_avx2() -> None:
    assert not detects_avx2(is_patched=False)


def test_the_main_module_of_a_rank_does_not_import_torch_before_the_patch() -> None:
    script = "import sys, recsys_core.training.__main__; print('torch' in sys.modules)"
    completed_process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert completed_process.stdout.split() == ["False"]
