"""The substance of nightjar: data, model, sharding, training, evaluation, index, serving.

Nothing here imports an orchestrator or an experiment tracker; every function can be called from a REPL.
"""

__version__ = "0.1.0"
