"""Entry point of the command `nightjar` and of `python -m flows.cli`."""

import atexit
import os
import sys


def run_command() -> None:
    """Run the `nightjar` command, and end the process without freeing the objects of its modules.

    Python would free a million objects in half a second, and nanobind, DuckDB's binding library, would print forty lines
    about the objects that Prefect keeps until then. If the output cannot be written or an exception is not handled, Python
    ends the process as usual and reports the error.
    """
    exit_code: int | None = None

    def end_process() -> None:
        if exit_code is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(exit_code)

    atexit.register(end_process)  # registered before the libraries are imported, so it runs after their exit handlers
    for stream in (sys.stdout, sys.stderr):  # in an ASCII locale, other characters are escaped
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    from flows.cli.main import main

    try:
        main()
    except SystemExit as system_exit:
        if isinstance(system_exit.code, int):
            exit_code = system_exit.code
        raise


if __name__ == "__main__":
    run_command()
