"""Copy of rank 0's output in the log of the launching process. Prefect shows this log as the log of the run."""

import logging
from pathlib import Path

logger = logging.getLogger(__name__)
MAX_LOGGED_LINES = 1_000
_LOG_PATTERN = "node-0/*/attempt_*/0/std*.log"


class RankOutput:
    """Follows stdout and stderr of rank 0 of one launch. Each line becomes a log record with the attribute `rank`.

    Only the first 1,000 lines are logged: a rank that prints in every step would fill the log of the run.

    Args:
        launch_folder: folder of the launch, which receives the output of all ranks.
    """

    def __init__(self, launch_folder: Path) -> None:
        self._launch_folder = launch_folder
        self._offset_by_path: dict[Path, int] = {}
        self._num_read_lines = 0

    def relay(self) -> None:
        """Log the complete lines that were written since the last call."""
        if self._num_read_lines > MAX_LOGGED_LINES:
            return
        for log_path in self._launch_folder.glob(_LOG_PATTERN):
            offset = self._offset_by_path.setdefault(log_path, 0)
            if log_path.stat().st_size == offset:
                continue
            with log_path.open("rb") as log_file:
                log_file.seek(offset)
                unread_bytes = log_file.read()
            complete_lines = unread_bytes[: unread_bytes.rfind(b"\n") + 1]
            self._offset_by_path[log_path] = offset + len(complete_lines)
            for line in complete_lines.decode(errors="replace").splitlines():
                self._log_line(line, log_path=log_path)

    def _log_line(self, line: str, *, log_path: Path) -> None:
        self._num_read_lines += 1
        if self._num_read_lines <= MAX_LOGGED_LINES:
            logger.info("rank 0: %s", line, extra={"rank": 0})
        elif self._num_read_lines == MAX_LOGGED_LINES + 1:
            logger.info("rank 0: the following lines are only in %s", log_path, extra={"rank": 0})
