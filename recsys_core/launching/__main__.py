"""Entry point of an agent, which runs the ranks of one host: `python -m recsys_core.launching LAUNCH_JSON`.

TorchX adds the arguments TOKEN HOST HOST_0_VARIABLE, which `hosts.agent.run_agent` documents.
"""

import sys
from pathlib import Path

from recsys_core.imports import fast_imports
from recsys_core.termination import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    with fast_imports():
        from recsys_core.launching.hosts.agent import run_agent
        from recsys_core.launching.torchrun import run_local_agent

    spec_path, *host_arguments = sys.argv[1:]
    sys.exit(run_agent(Path(spec_path), *host_arguments) if host_arguments else run_local_agent(Path(spec_path)))
