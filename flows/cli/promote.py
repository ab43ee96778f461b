"""`nightjar promote` and `nightjar rollback`: a person chooses the champion."""

import os
from collections.abc import Mapping
from typing import Any, Literal

from flows.cli import output
from flows.interruption import interruptible
from flows.settings.config_file import LoadedConfig
from recsys_core.errors import NightjarError


def choose_champion(loaded: LoadedConfig, command: Literal["promote", "rollback"], *, parameters: Mapping[str, Any]) -> None:
    """Run the flow `command` and print its result.

    If PREFECT_API_URL is set, that server records the flow run and its event. Otherwise the function of the flow runs without a
    Prefect server, so an urgent rollback depends on fewer parts.
    """
    with interruptible(lambda: f"look at the aliases with: nightjar releases {loaded.path}"):
        try:
            from flows import champion
            from flows.scheduled import deployments  # takes seconds

            flow: Any = {"promote": champion.promote, "rollback": champion.rollback}[command]
            flow_parameters = {**loaded.flow_parameters, **parameters}
            if "PREFECT_API_URL" in os.environ:
                with deployments.prefect_client():  # raises InputError if the server does not answer
                    final_state = flow(**flow_parameters, return_state=True)
            else:
                final_state = flow.fn(**flow_parameters)
            if final_state.is_failed():
                final_state.result()  # raises the error of the flow
        except NightjarError:
            raise
        except Exception as error:  # any error of a library
            from flows.cli.runner import save_traceback

            raise save_traceback(error, folder=loaded.config.workspace) from error
    facts = {"result": final_state.message, "versions": f"nightjar releases {loaded.path}"}
    output.print_facts(facts, console=output.stdout)
