"""Entry of `python -m flows.cli`."""

from flows.cli.main import main

main()
