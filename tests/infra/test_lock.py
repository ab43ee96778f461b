"""The committed lock files are complete, contain hashes and no addresses, and satisfy pyproject.toml."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ROOT / "infra" / "locks"
NAMES = ("bootstrap", "cpu", "torch", "cuda", "gpu", "spark", "serve")


def locked(*names: str) -> dict[str, Requirement]:
    lines = (line for name in names for line in (LOCKS / f"{name}.txt").read_text().splitlines())
    requirements = [Requirement(line.rstrip(" \\")) for line in lines if re.match("[a-z0-9]", line)]
    assert len({requirement.name for requirement in requirements}) == len(requirements)
    return {requirement.name: requirement for requirement in requirements}


def version(requirement: Requirement) -> str:
    (pin,) = requirement.specifier
    assert pin.operator == "=="
    return pin.version


@pytest.mark.parametrize("name", NAMES)
def test_a_lock_file_contains_only_pinned_versions_and_hashes(name: str) -> None:
    blocks = re.split(r"\n(?! )", (LOCKS / f"{name}.txt").read_text().strip())
    blocks = [block for block in blocks if not block.startswith("#")]
    assert blocks
    for block in blocks:
        assert re.fullmatch(r"[a-z0-9-]+==[^\s:/]+( ; [^:/]+?)?( \\\n    --hash=sha256:[0-9a-f]{64})+", block), block[:200]


def test_the_cpu_environment_never_gets_a_cuda_package() -> None:
    names = set(locked("cpu"))
    assert {"fbgemm-gpu-cpu", "faiss-cpu", "torchrec"} <= names
    assert not {
        name for name in names if name.startswith(("nvidia-", "cuda-")) or name in ("fbgemm-gpu", "faiss-gpu", "triton")
    }


def test_the_gpu_environment_has_only_gpu_builds() -> None:
    names = set(locked("gpu"))
    assert {"fbgemm-gpu", "faiss-gpu", "torch", "triton", *locked("cuda")} <= names
    assert not {"fbgemm-gpu-cpu", "faiss-cpu"} & names


def test_both_devices_have_the_same_versions_of_shared_packages() -> None:
    cpu, gpu = locked("cpu", "torch", "cuda"), locked("gpu")
    shared = cpu.keys() & gpu.keys()
    assert len(shared) > 100
    assert {name: str(cpu[name]) for name in shared} == {name: str(gpu[name]) for name in shared}


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_the_lock_satisfies_every_requirement_of_the_project(device: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    requirements = [
        *project["project"]["dependencies"],
        *project["project"]["optional-dependencies"][device],
        *project["project"]["optional-dependencies"]["torchx"],
        *project["project"]["optional-dependencies"]["spark"],
        *project["dependency-groups"]["dev"],
        *project["build-system"]["requires"],
    ]
    lock = locked("gpu", "spark") if device == "gpu" else locked("cpu", "torch", "spark")
    for requirement in map(Requirement, requirements):
        assert requirement.specifier.contains(version(lock[requirement.name.lower()])), f"{requirement}: run make lock"


def test_the_environment_of_the_server_is_a_part_of_the_cpu_environment_without_training() -> None:
    cpu, serve = locked("cpu"), locked("serve")
    assert {name: str(requirement) for name, requirement in serve.items()} == {name: str(cpu[name]) for name in serve}
    assert not {"torchrec", "fbgemm-gpu-cpu", "prefect", "duckdb", "optuna"} & serve.keys()


def test_the_server_imports_only_packages_of_its_environment() -> None:
    code = (
        "import importlib.metadata, sys\n"
        "import flows.cli.main, flows.cli.registry, tasks.serve.server, recsys_core.http_server.app\n"
        "imported = {name.partition('.')[0] for name in sys.modules}\n"
        "packages = importlib.metadata.packages_distributions()\n"
        "print(*{package for name in imported for package in packages.get(name, ())})\n"
    )
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    imported = {canonicalize_name(name) for name in process.stdout.split()}
    assert {"torch", "faiss-cpu", "mlflow"} <= imported
    optional = {
        "py4j",
        "pydantic-extra-types",
        "pyspark",
        "pytz",
        "sniffio",
        "tqdm",
    }  # other packages import them if they are installed
    assert imported - optional - {"nightjar"} <= locked("serve", "torch", "cuda", "bootstrap").keys()


def install(venv: Path, *, device: str, python: str, extras: str = "") -> subprocess.CompletedProcess[str]:
    bash = shutil.which("bash")
    assert bash is not None
    command = [bash, str(ROOT / "infra" / "install.sh"), str(venv), device, python, extras]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def test_an_unknown_device_is_rejected_and_the_environment_is_kept(tmp_path: Path) -> None:
    process = install(tmp_path, device="tpu", python=sys.executable)
    assert (process.returncode, process.stderr) == (2, "DEVICE is tpu; it must be cpu or gpu\n")
    assert tmp_path.is_dir()


def test_unknown_extras_are_rejected_and_the_environment_is_kept(tmp_path: Path) -> None:
    process = install(tmp_path, device="cpu", python=sys.executable, extras="flink")
    assert (process.returncode, process.stderr) == (2, "EXTRAS is flink; it must be empty or spark\n")
    assert tmp_path.is_dir()


def test_a_python_that_is_too_old_is_rejected_before_anything_is_created(tmp_path: Path) -> None:
    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.9.18\nexit 1\n')
    old.chmod(0o755)
    process = install(tmp_path / "venv", device="cpu", python=str(old))
    assert process.returncode == 2
    assert f"nightjar needs Python 3.11 to 3.13, but {old} is Python 3.9.18" in process.stderr
    assert not (tmp_path / "venv").exists()
