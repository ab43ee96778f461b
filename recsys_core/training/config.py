"""What the user says about training."""

from pydantic import Field

from recsys_core.config import Frozen


class TrainingConfig(Frozen):
    """Loop, optimizers, checkpoints and restarts."""

    epochs: int = Field(10, ge=1, description="passes over the training events")
    batch_size: int = Field(1024, ge=1, description="examples per rank and step")
    table_learning_rate: float = Field(
        0.05, gt=0, description="row-wise Adagrad on the embedding tables, fused into the backward pass"
    )
    dense_learning_rate: float = Field(1e-3, gt=0, description="Adam on the towers' layers")
    warmup_steps: int = Field(100, ge=0, description="steps over which both learning rates rise linearly")
    seed: int = Field(7, ge=0, description="initialisation, shuffling, dropout and negatives")
    log_every_steps: int = Field(20, ge=1, description="a line in metrics.jsonl every so many steps")
    checkpoint_every_steps: int = Field(1000, ge=1, description="besides the one at the end")
    keep_checkpoints: int = Field(2, ge=1, description="older ones are removed")
    attempts: int = Field(
        2, ge=1, description="a failed torchrun is started anew from the last checkpoint, this many launches in all"
    )
    start_timeout_s: float = Field(180.0, gt=0, description="until the first sign of life of the trainer")
    silence_timeout_s: float = Field(600.0, gt=0, description="longest time without a sign of life while training")
