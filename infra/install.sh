#!/usr/bin/env bash
# Create a virtual environment in FOLDER from the lock files, and delete FOLDER first. Usage: infra/install.sh FOLDER DEVICE PYTHON [EXTRAS]. EXTRAS may be spark. DEVICE is cpu, gpu, serve (`nightjar serve` alone) or tools (only uv).
set -euo pipefail
venv=$1 device=$2 python=$3 extras=${4:-}
locks=infra/locks

case $device in
    cpu | gpu | serve | tools) ;;
    *)
        echo "DEVICE is $device; it must be cpu or gpu" >&2
        exit 2
        ;;
esac
case $extras in
    "" | spark) ;;
    *)
        echo "EXTRAS is $extras; it must be empty or spark" >&2
        exit 2
        ;;
esac
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || {
    echo "nightjar needs Python 3.11 to 3.13, but $python is $("$python" -V 2>&1 || true); name another one: make PYTHON=python3.12" >&2
    exit 2
}
[ "$(uname -s)" = Linux ] || {
    echo "nightjar runs on Linux: fbgemm has no wheels for $(uname -s)" >&2
    exit 2
}

rm -rf "$venv"
"$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --no-compile --require-hashes -r "$locks/bootstrap.txt"

install() {
    # Compile bytecode once, on all cores. Otherwise each process of a run compiles its imports.
    "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --no-deps --require-hashes --compile-bytecode -r "$locks/$1.txt"
}

case $device in
    tools) ;;
    gpu) install gpu ;;
    cpu | serve)
        # pip selects the build by its settings (a CPU index, a folder of wheels); the hashes of the lock verify the file.
        # Two steps, because pip ranks a wheel in a folder last if hashes are required in the same step.
        wheels=$(mktemp -d)
        trap 'rm -rf "$wheels"' EXIT
        "$venv/bin/python" -m pip download --quiet --no-deps --dest "$wheels" "$(grep -o '^torch==[0-9.]*' "$locks/torch.txt")"
        "$venv/bin/python" -m pip install --quiet --no-compile --no-deps --no-index --find-links "$wheels" \
            --require-hashes -r "$locks/torch.txt"
        "$venv/bin/python" -m compileall -qq -j 0 "$venv"/lib/python3*/site-packages/torch || true  # a few of its files are templates
        if grep --quiet '^Requires-Dist: nvidia-' "$venv"/lib/python3*/site-packages/torch-*.dist-info/METADATA; then
            install cuda
        fi
        install "$device"
        ;;
esac
if [ "$extras" = spark ]; then
    # pyspark is published as source. Its build needs setuptools, and compiles nothing.
    install spark
fi
