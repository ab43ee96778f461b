"""What can go wrong, by whose fault it is. The class decides the exit code of the command line."""


class NightjarError(Exception):
    """Base of every error raised on purpose; `nightjar` exits with `exit_code`."""

    exit_code = 1


class InputError(NightjarError, ValueError):
    """The config or the data is wrong: the user can mend it. Names the place, both values and the way out."""

    exit_code = 2


class StageError(NightjarError, RuntimeError):
    """A stage failed for a reason that is not in its input: a worker died, a disk is full, a file changed."""
