"""Resolution of pyproject.toml into the hashed lock files in infra/locks, for `make lock`. infra/README.md describes them.

Versions that are already locked are kept. Arguments are passed to uv: `make lock ARGS="--upgrade-package prefect==3.8.9"`.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCK_FOLDER = ROOT / "infra" / "locks"
# --universal writes one lock file with markers for all Pythons. --fork-strategy fewest locks the same versions on each Python.
UV_FLAGS = ["--universal", "--python-version", "3.11", "--fork-strategy", "fewest", "--generate-hashes"]
UV_FLAGS += ["--no-header", "--no-annotate", "--quiet"]
TORCH_VERSION = "2.14.1"
# Requirements that replace the requirements of other packages. They are not in pyproject.toml, because `uv pip install` would
# read them there and install the newest certifi instead of the locked certifi.
OVERRIDES = (
    "urllib3>=2.5",  # torchx 0.7.0 requires urllib3 1, but only for its ray scheduler
    "certifi>=2026.10",  # prefect 3.9.1 requires a release of certifi that some mirrors do not have yet
)

# sha256 of CPU builds of torch that are not on PyPI. torch.txt accepts them in addition to PyPI's builds. infra/README.md
# describes how to add one.
TORCH_CPU_BUILDS: tuple[str, ...] = ()

SPARK_PACKAGES = ("py4j", "pyspark", "sqlglot")
"""Packages that spark.txt contains, because most installations do not need the 430 MB of Java archives of Spark."""

TITLE_BY_FILE = {
    "bootstrap.txt": "The installer of the other lock files.",
    "cpu.txt": "Everything for DEVICE=cpu except torch, Linux x86-64 and aarch64. Installed with --no-deps after torch.txt.",
    "torch.txt": "torch for DEVICE=cpu: the build that the package index of this machine offers.",
    "cuda.txt": "Requirements of torch if the build of torch.txt is a CUDA build.",
    "gpu.txt": "Everything for DEVICE=gpu, Linux x86-64, CUDA. Resolved, not yet tested on a machine with a GPU.",
    "spark.txt": "The extra spark, for every DEVICE. Installed with EXTRAS=spark.",
    "serve.txt": "Everything for DEVICE=serve except torch: the part of cpu.txt that `nightjar serve` needs.",
}


def lock(uv: str, *, uv_options: list[str]) -> None:
    """Write all files of infra/locks, and keep the versions that are already locked."""
    LOCK_FOLDER.mkdir(exist_ok=True)
    pins = "\n".join(pin for path in LOCK_FOLDER.glob("*.txt") for pin in re.findall(r"(?m)^[a-z0-9][^\s;]*", path.read_text()))
    pyproject_path = str(ROOT / "pyproject.toml")
    project_requirements = [pyproject_path, "--group", f"{pyproject_path}:dev", "--extra", "servers", "--extra", "torchx"]
    project_requirements += ["--extra", "ials", "--extra", "onnx", "--extra", "spark", "--extra", "stores"]
    bootstrap_packages = compile_lock(uv, requirements=["-"], stdin="uv", pins=pins, uv_options=uv_options)
    # torchrec requires fbgemm-gpu, the CUDA build. It has the import name of fbgemm-gpu-cpu, so only one may be installed.
    cpu_packages = compile_lock(
        uv,
        requirements=[*project_requirements, "--extra", "cpu"],
        excluded_package="fbgemm-gpu",
        pins=pins,
        uv_options=uv_options,
    )
    gpu_packages = compile_lock(
        uv,
        requirements=[*project_requirements, "--extra", "gpu"],
        excluded_package="faiss-cpu",  # milvus-lite requires it, but it has the import name of faiss-gpu
        pins=pins,
        uv_options=uv_options,
    )
    serve_packages = compile_lock(uv, requirements=["--group", f"{pyproject_path}:serve"], pins=pins, uv_options=uv_options)
    serve_packages = {package: cpu_packages[package] for package in serve_packages}

    torch_packages = {
        "torch": cpu_packages["torch"] + "".join(f" \\\n    --hash=sha256:{sha256}" for sha256 in TORCH_CPU_BUILDS)
    }
    if not torch_packages["torch"].startswith(f"torch=={TORCH_VERSION} "):
        raise SystemExit(
            f"pyproject.toml requires {torch_packages['torch'].split()[0]}, but TORCH_CPU_BUILDS is for "
            f"torch=={TORCH_VERSION}; change both"
        )
    spark_packages = {package: cpu_packages[package] for package in SPARK_PACKAGES}
    cuda_packages = {package: text for package, text in cpu_packages.items() if re.match(r"(nvidia|cuda)-|triton$", package)}
    separate_packages = {*cuda_packages, *spark_packages, "torch"}
    cpu_packages, serve_packages = (
        {package: text for package, text in packages.items() if package not in separate_packages}
        for packages in (cpu_packages, serve_packages)
    )
    gpu_packages = {package: text for package, text in gpu_packages.items() if package not in spark_packages}
    all_packages = (
        bootstrap_packages, cpu_packages, torch_packages, cuda_packages, gpu_packages, spark_packages, serve_packages,
    )  # fmt: skip
    for (file_name, title), packages in zip(TITLE_BY_FILE.items(), all_packages, strict=True):
        lines = [f"# {title}", "# Written by `make lock`.", *packages.values()]
        (LOCK_FOLDER / file_name).write_text("\n".join(lines) + "\n")
        sys.stderr.write(f"infra/locks/{file_name}: {len(packages)} packages\n")


def compile_lock(
    uv: str,
    *,
    requirements: list[str],
    pins: str,
    uv_options: list[str],
    excluded_package: str = "",
    stdin: str | None = None,
) -> dict[str, str]:
    """Return the text of each locked package (version, marker, hashes) by its name, for all supported Pythons.

    `pins` are written into uv's output file first, because uv prefers the versions of an existing output file.
    """
    with tempfile.TemporaryDirectory() as folder:
        output_path, excludes_path, overrides_path = (Path(folder, f"{name}.txt") for name in ("lock", "excludes", "overrides"))
        output_path.write_text(pins)
        excludes_path.write_text(excluded_package)
        overrides_path.write_text("\n".join(OVERRIDES))
        file_options = ["--excludes", str(excludes_path), "--overrides", str(overrides_path), "--output-file", str(output_path)]
        subprocess.run(
            [uv, "pip", "compile", *requirements, *UV_FLAGS, *file_options, *uv_options],
            input=stdin,
            text=True,
            check=True,
        )
        package_blocks = re.findall(r"(?m)^[a-z0-9].*(?:\n +--hash=.*)*", output_path.read_text())
    return {re.split(r"[=\s]", block, maxsplit=1)[0]: block for block in package_blocks}


if __name__ == "__main__":
    lock(sys.argv[1], uv_options=sys.argv[2:])
