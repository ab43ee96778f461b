"""`python -m flows.cli`."""

from flows.cli.main import run_command

if __name__ == "__main__":
    run_command()
