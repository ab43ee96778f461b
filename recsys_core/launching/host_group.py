"""What `launch` needs of whatever starts the hosts' agents."""

from typing import Literal, Protocol

State = Literal["queued", "running", "ended"]


class Group(Protocol):
    """The agents of one attempt."""

    def state(self) -> State:
        """queued: no host has been given yet."""

    def story(self) -> str:
        """How it ended, as far as who started it knows: an exit code, a scheduler's word."""

    def log(self, node: int) -> str:
        """The last lines that the agent of a host printed; empty where they cannot be had (yet)."""

    def end(self) -> None:
        """Ends what still runs; returns when nothing does."""
