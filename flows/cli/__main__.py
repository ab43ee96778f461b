"""Entry point of the command `nightjar` and of `python -m flows.cli`."""

import atexit
import os
import sys
from contextlib import suppress


def run_command() -> None:
    """Run the `nightjar` command, and end the process without freeing the objects of its modules.

    Python would free a million objects in half a second, and nanobind, DuckDB's binding library, would print forty lines
    about the objects that Prefect keeps until then.
    """
    exit_code = 1

    def end_process() -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(exit_code)

    atexit.register(end_process)  # registered before the libraries are imported, so it runs after their exit handlers
    from flows.cli.main import main

    try:
        main()
        exit_code = 0
    except SystemExit as system_exit:
        exit_code = system_exit.code if isinstance(system_exit.code, int) else 0
        raise


if __name__ == "__main__":
    run_command()
