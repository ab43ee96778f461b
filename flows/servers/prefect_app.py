"""Application of the embedded Prefect server. Prefect reads its settings from the environment when this module is imported."""

import asyncio
import os
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

import prefect
from fastapi import FastAPI
from filelock import FileLock
from prefect.server.api import server
from prefect.server.database import provide_database_interface
from prefect.server.services.db_vacuum import schedule_orphan_vacuum_tasks, schedule_vacuum_tasks
from prefect.server.services.perpetual_services import get_perpetual_services
from prefect.settings import get_current_settings

from recsys_core.disk import atomic_replacement


def create_app() -> FastAPI:
    """Create the database if it is missing, and return Prefect's application, which deletes old flow runs.

    Prefect's service that deletes old flow runs with their logs and artifacts is enabled by
    PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED. By default, an embedded server never runs this service.
    """
    create_database()
    for service in get_perpetual_services():
        if service.function in (schedule_vacuum_tasks, schedule_orphan_vacuum_tasks):
            service.run_in_ephemeral = True
    return server.create_app()


def create_database() -> None:
    """Create the database in PREFECT_HOME if it is missing. At its start, Prefect migrates an existing database.

    A new database is copied from the user's cache, because Prefect's migrations of an empty database take seconds.
    """
    prefect_settings = get_current_settings()
    database_path = prefect_settings.home / "prefect.db"
    connection_url = prefect_settings.server.database.connection_url
    if connection_url is None or connection_url.get_secret_value() != f"sqlite+aiosqlite:///{database_path}":
        return
    cache_folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nightjar"
    template_path = cache_folder / f"prefect-{prefect.__version__}.db"
    prefect_settings.home.mkdir(parents=True, exist_ok=True)
    with FileLock(prefect_settings.home / ".migration.lock"):  # two runs may create the database at the same time
        if database_path.is_file():
            return
        if template_path.is_file():
            _copy_database(template_path, database_path)
            return
        asyncio.run(provide_database_interface().create_db())
        with suppress(OSError):  # without a writable cache, each new workspace is migrated from an empty database
            cache_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _copy_database(database_path, template_path)


def _copy_database(source_path: Path, target_path: Path) -> None:
    """Copy a sqlite database atomically."""
    with (
        atomic_replacement(target_path) as temporary_path,
        closing(sqlite3.connect(source_path)) as source_database,
        closing(sqlite3.connect(temporary_path)) as target_database,
    ):
        source_database.backup(target_database)
