"""Fixtures of the retention tests."""

from tests.tasks.retention.run_folders_by_hand import add_run, rejected_report, template

__all__ = ["add_run", "rejected_report", "template"]
