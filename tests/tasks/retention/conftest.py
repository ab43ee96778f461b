"""Fixtures of the retention tests."""

from tests.tasks.retention.run_folders_by_hand import add_run, complete_run_folder, rejected_report_folder

__all__ = ["add_run", "complete_run_folder", "rejected_report_folder"]
