"""Resolution of pyproject.toml into the hashed lock files of infra/locks: `make lock`; see infra/README.md.

Versions that are already locked are kept. Arguments are passed to uv: `make lock ARGS="--upgrade-package prefect==3.8.9"`.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ROOT / "infra" / "locks"
# --universal: one lock file for all Pythons, with markers. --fork-strategy fewest: the same versions on each Python.
FLAGS = ["--universal", "--python-version", "3.11", "--fork-strategy", "fewest", "--generate-hashes"]
FLAGS += ["--no-header", "--no-annotate", "--quiet"]
TORCH = "2.14.1"

# sha256 of CPU builds of torch that are not on PyPI. torch.txt accepts them in addition to PyPI's builds. infra/README.md
# describes how to add one.
TORCH_CPU_BUILDS: tuple[str, ...] = ()

FILES = {
    "bootstrap.txt": "The installer of the other lock files.",
    "cpu.txt": "Everything for DEVICE=cpu except torch, Linux x86-64 and aarch64. Installed with --no-deps after torch.txt.",
    "torch.txt": "torch for DEVICE=cpu: the build that the package index of this machine offers.",
    "cuda.txt": "Requirements of torch if the build of torch.txt is a CUDA build.",
    "gpu.txt": "Everything for DEVICE=gpu, Linux x86-64, CUDA. Resolved, not yet tested on a machine with a GPU.",
}


def lock(uv: str, *, options: list[str]) -> None:
    """Write all files of infra/locks, keeping versions that are already locked."""
    LOCKS.mkdir(exist_ok=True)
    pins = "\n".join(pin for path in LOCKS.glob("*.txt") for pin in re.findall(r"(?m)^[a-z0-9][^\s;]*", path.read_text()))
    pyproject = str(ROOT / "pyproject.toml")
    project = [pyproject, "--group", f"{pyproject}:dev", "--extra", "servers", "--extra", "torchx"]
    bootstrap = compile_lock(uv, sources=["-"], stdin="uv", pins=pins, options=options)
    # torchrec requires fbgemm-gpu, the CUDA build. It has the import name of fbgemm-gpu-cpu, so only one may be installed.
    cpu = compile_lock(uv, sources=[*project, "--extra", "cpu"], exclude="fbgemm-gpu", pins=pins, options=options)
    gpu = compile_lock(uv, sources=[*project, "--extra", "gpu"], pins=pins, options=options)

    torch = {"torch": cpu["torch"] + "".join(f" \\\n    --hash=sha256:{sha256}" for sha256 in TORCH_CPU_BUILDS)}
    if not torch["torch"].startswith(f"torch=={TORCH} "):
        raise SystemExit(
            f"pyproject.toml requires {torch['torch'].split()[0]}, but TORCH_CPU_BUILDS is for torch=={TORCH}; change both"
        )
    cuda = {name: block for name, block in cpu.items() if re.match(r"(nvidia|cuda)-|triton$", name)}
    cpu = {name: block for name, block in cpu.items() if name not in cuda and name != "torch"}
    for (name, title), blocks in zip(FILES.items(), (bootstrap, cpu, torch, cuda, gpu), strict=True):
        lines = [f"# {title}", "# Written by `make lock`.", *blocks.values()]
        (LOCKS / name).write_text("\n".join(lines) + "\n")
        sys.stderr.write(f"infra/locks/{name}: {len(blocks)} packages\n")


def compile_lock(
    uv: str, *, sources: list[str], pins: str, options: list[str], exclude: str = "", stdin: str | None = None
) -> dict[str, str]:
    """Return the resolution for all supported Pythons: package name -> its lines (version, marker, hashes).

    `pins` are written into uv's output file first, because uv prefers the versions of an existing output file.
    """
    with tempfile.TemporaryDirectory() as folder:
        output, excludes = Path(folder, "lock.txt"), Path(folder, "excludes.txt")
        output.write_text(pins)
        excludes.write_text(exclude)
        files = ["--excludes", str(excludes), "--output-file", str(output)]
        subprocess.run([uv, "pip", "compile", *sources, *FLAGS, *files, *options], input=stdin, text=True, check=True)
        blocks = re.findall(r"(?m)^[a-z0-9].*(?:\n +--hash=.*)*", output.read_text())
    return {re.split(r"[=\s]", block, maxsplit=1)[0]: block for block in blocks}


if __name__ == "__main__":
    lock(sys.argv[1], options=sys.argv[2:])
