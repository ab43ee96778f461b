"""Resolves pyproject.toml into the hashed locks of infra/locks. Run it as `make lock`; see infra/README.md.

Pins that are already in a lock are kept; arguments are handed to uv: `make lock ARGS="--upgrade-package prefect==3.8.9"`.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ROOT / "infra" / "locks"
# Universal: markers decide at installation, so one lock serves every Python; fewest: with the same versions on each.
FLAGS = ["--universal", "--python-version", "3.11", "--fork-strategy", "fewest", "--generate-hashes"]
FLAGS += ["--no-header", "--no-annotate", "--quiet"]
TORCH = "2.14.1"

# sha256 of CPU builds of torch that PyPI does not have: torch.txt accepts them beside PyPI's own builds. None was looked up for
# 2.14.1; infra/README.md says how to add one.
TORCH_CPU_BUILDS: tuple[str, ...] = ()

FILES = {
    "bootstrap.txt": "The installer of the other locks.",
    "cpu.txt": "Everything for DEVICE=cpu but torch, Linux x86-64 and aarch64. Installed with --no-deps after torch.txt.",
    "torch.txt": "torch for DEVICE=cpu: whichever build the index of this machine offers.",
    "cuda.txt": "What torch needs where the build from torch.txt is a CUDA one.",
    "gpu.txt": "Everything for DEVICE=gpu, Linux x86-64, CUDA. Resolved, not yet run on a machine with a GPU.",
}


def lock(uv: str, *, options: list[str]) -> None:
    """Writes all files of infra/locks, keeping the pins that are there."""
    LOCKS.mkdir(exist_ok=True)
    pins = "\n".join(pin for path in LOCKS.glob("*.txt") for pin in re.findall(r"(?m)^[a-z0-9][^\s;]*", path.read_text()))
    project = [str(ROOT / "pyproject.toml"), "--group", f"{ROOT / 'pyproject.toml'}:dev", "--extra", "torchx"]
    bootstrap = compile_lock(uv, sources=["-"], stdin="uv", pins=pins, options=options)
    # torchrec asks for fbgemm-gpu, the CUDA build, which has the import name of fbgemm-gpu-cpu and must not lie beside it.
    cpu = compile_lock(uv, sources=[*project, "--extra", "cpu"], exclude="fbgemm-gpu", pins=pins, options=options)
    gpu = compile_lock(uv, sources=[*project, "--extra", "gpu"], pins=pins, options=options)

    torch = {"torch": cpu["torch"] + "".join(f" \\\n    --hash=sha256:{sha256}" for sha256 in TORCH_CPU_BUILDS)}
    if not torch["torch"].startswith(f"torch=={TORCH} "):
        raise SystemExit(f"pyproject.toml wants {torch['torch'].split()[0]}, but TORCH_CPU_BUILDS is of {TORCH}; change both")
    cuda = {name: block for name, block in cpu.items() if re.match(r"(nvidia|cuda)-|triton$", name)}
    cpu = {name: block for name, block in cpu.items() if name not in cuda and name != "torch"}
    for (name, title), blocks in zip(FILES.items(), (bootstrap, cpu, torch, cuda, gpu), strict=True):
        lines = [f"# {title}", "# Written by `make lock`.", *blocks.values()]
        (LOCKS / name).write_text("\n".join(lines) + "\n")
        sys.stderr.write(f"infra/locks/{name}: {len(blocks)} packages\n")


def compile_lock(
    uv: str, *, sources: list[str], pins: str, options: list[str], exclude: str = "", stdin: str | None = None
) -> dict[str, str]:
    """The resolution for all supported Pythons: package name -> its lines (pin, marker, hashes).

    uv takes the versions in its output file for preferences, so `pins` keep what was locked before.
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
