"""The committed lock files, which contain only versions and hashes, and install.sh, which installs them."""

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
LOCK_FOLDER = ROOT / "infra" / "locks"
LOCK_NAMES = ("bootstrap", "cpu", "torch", "cuda", "gpu", "spark", "serve")


def locked_requirements(*lock_names: str) -> dict[str, Requirement]:
    """Return the locked requirements by package. Assert that no package is in two of these lock files."""
    lines = (line for name in lock_names for line in (LOCK_FOLDER / f"{name}.txt").read_text().splitlines())
    requirements = [Requirement(line.rstrip(" \\")) for line in lines if re.match("[a-z0-9]", line)]
    assert len({requirement.name for requirement in requirements}) == len(requirements)
    return {requirement.name: requirement for requirement in requirements}


def pinned_version(requirement: Requirement) -> str:
    (pin,) = requirement.specifier
    assert pin.operator == "=="
    return pin.version


@pytest.mark.parametrize("lock_name", LOCK_NAMES)
def test_a_lock_file_contains_only_pinned_versions_and_hashes(lock_name: str) -> None:
    package_blocks = re.split(r"\n(?! )", (LOCK_FOLDER / f"{lock_name}.txt").read_text().strip())
    package_blocks = [package_block for package_block in package_blocks if not package_block.startswith("#")]
    assert package_blocks
    for package_block in package_blocks:
        assert re.fullmatch(r"[a-z0-9-]+==[^\s:/]+( ; [^:/]+?)?( \\\n    --hash=sha256:[0-9a-f]{64})+", package_block), (
            package_block[:200]
        )


def test_the_cpu_environment_contains_no_cuda_package() -> None:
    package_names = set(locked_requirements("cpu"))
    assert {"fbgemm-gpu-cpu", "faiss-cpu", "torchrec"} <= package_names
    assert not {
        name for name in package_names if name.startswith(("nvidia-", "cuda-")) or name in ("fbgemm-gpu", "faiss-gpu", "triton")
    }


def test_the_gpu_environment_has_only_gpu_builds() -> None:
    package_names = set(locked_requirements("gpu"))
    assert {"fbgemm-gpu", "faiss-gpu", "torch", "triton", *locked_requirements("cuda")} <= package_names
    assert not {"fbgemm-gpu-cpu", "faiss-cpu"} & package_names


def test_packages_of_both_environments_have_the_same_version() -> None:
    cpu_lock, gpu_lock = locked_requirements("cpu", "torch", "cuda"), locked_requirements("gpu")
    shared_packages = cpu_lock.keys() & gpu_lock.keys()
    assert len(shared_packages) > 100
    assert {name: str(cpu_lock[name]) for name in shared_packages} == {name: str(gpu_lock[name]) for name in shared_packages}


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_the_lock_satisfies_every_requirement_of_the_project(device: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    requirement_texts = [
        *project["project"]["dependencies"],
        *project["project"]["optional-dependencies"][device],
        *project["project"]["optional-dependencies"]["torchx"],
        *project["project"]["optional-dependencies"]["spark"],
        *project["dependency-groups"]["dev"],
        *project["build-system"]["requires"],
    ]
    lock = locked_requirements("gpu", "spark") if device == "gpu" else locked_requirements("cpu", "torch", "spark")
    for requirement in map(Requirement, requirement_texts):
        assert requirement.specifier.contains(pinned_version(lock[requirement.name.lower()])), f"{requirement}: run make lock"


def test_the_server_lock_is_a_part_of_the_cpu_lock_without_training_packages() -> None:
    cpu_lock, server_lock = locked_requirements("cpu"), locked_requirements("serve")
    assert {name: str(server_lock[name]) for name in server_lock} == {name: str(cpu_lock[name]) for name in server_lock}
    assert not {"torchrec", "fbgemm-gpu-cpu", "prefect", "duckdb", "optuna"} & server_lock.keys()


def test_the_server_imports_only_packages_of_its_environment() -> None:
    script = (
        "import gc, importlib.metadata, sys\n"
        "gc.disable()\n"  # imports are faster without it
        "import flows.cli.main, flows.cli.commands.registry, tasks.serve.server, recsys_core.http_server.app\n"
        "imported = {name.partition('.')[0] for name in sys.modules}\n"
        "packages = importlib.metadata.packages_distributions()\n"
        "print(*{package for name in imported for package in packages.get(name, ())})\n"
    )
    process = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    imported_packages = {canonicalize_name(name) for name in process.stdout.split()}
    assert {"torch", "faiss-cpu", "mlflow"} <= imported_packages
    # Other packages import these packages if they are installed.
    optional_packages = {"py4j", "pydantic-extra-types", "pyspark", "pytz", "sniffio", "tqdm"}
    assert (
        imported_packages - optional_packages - {"nightjar"}
        <= locked_requirements("serve", "torch", "cuda", "bootstrap").keys()
    )


def run_install_script(
    venv_folder: Path, *, device: str, python_path: str, extras: str = ""
) -> subprocess.CompletedProcess[str]:
    """Execute install.sh for the environment in the folder `venv_folder`."""
    bash_path = shutil.which("bash")
    assert bash_path is not None
    command = [bash_path, str(ROOT / "infra" / "install.sh"), str(venv_folder), device, python_path, extras]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def test_an_unknown_device_is_rejected_and_an_existing_environment_is_kept(tmp_path: Path) -> None:
    (tmp_path / "pyvenv.cfg").touch()
    process = run_install_script(tmp_path, device="tpu", python_path=sys.executable)
    assert (process.returncode, process.stderr) == (2, "DEVICE is tpu; it must be cpu or gpu\n")
    assert (tmp_path / "pyvenv.cfg").is_file()


def test_unknown_extras_are_rejected_and_an_existing_environment_is_kept(tmp_path: Path) -> None:
    (tmp_path / "pyvenv.cfg").touch()
    process = run_install_script(tmp_path, device="cpu", python_path=sys.executable, extras="flink")
    assert (process.returncode, process.stderr) == (2, "EXTRAS is flink; it must be empty or spark\n")
    assert (tmp_path / "pyvenv.cfg").is_file()


def test_a_python_that_is_too_old_is_rejected_before_an_environment_is_created(tmp_path: Path) -> None:
    old_python_path = tmp_path / "python3.9"
    old_python_path.write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.9.18\nexit 1\n')
    old_python_path.chmod(0o755)
    process = run_install_script(tmp_path / "venv", device="cpu", python_path=str(old_python_path))
    assert process.returncode == 2
    assert f"nightjar needs Python 3.11 to 3.13, but {old_python_path} is Python 3.9.18" in process.stderr
    assert not (tmp_path / "venv").exists()
