"""Process of the embedded Prefect server: `python -m flows.servers.prefect_process FD`, where FD is a listening socket.

The process imports Prefect's libraries while the command reads the config. It imports Prefect itself after it has received
its environment variables on stdin, because Prefect reads its settings at import.
"""

import os
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

from flows.servers.server_process import REQUEST_GRACE_S, inherited_socket, receive_start_message
from recsys_core.disk import atomic_replacement
from recsys_core.imports import fast_imports
from recsys_core.parent_process import die_with_parent


def main() -> None:
    """Serve Prefect's API on the socket until SIGTERM, or until the parent process ends."""
    die_with_parent()
    with fast_imports():
        _import_libraries()
        if not receive_start_message():
            return
        import uvicorn

        migrate_database()
        enable_flow_run_vacuum()
        from prefect.server.api.server import create_app

        server_config = uvicorn.Config(
            create_app(), log_level="error", lifespan="on", timeout_graceful_shutdown=REQUEST_GRACE_S
        )
    uvicorn.Server(server_config).run(sockets=[inherited_socket()])


def _import_libraries() -> None:
    """Import the libraries of Prefect that do not read Prefect's settings."""
    import docket  # noqa: F401
    import fastapi  # noqa: F401
    import uvicorn  # noqa: F401


def migrate_database() -> None:
    """Migrate the database in PREFECT_HOME to the schema of the installed Prefect.

    A new database is copied from the user's cache, because Prefect's migrations of an empty database take seconds. If the
    user has configured another database, Prefect itself migrates that database.
    """
    import asyncio

    import prefect
    from filelock import FileLock
    from prefect.settings import get_current_settings

    prefect_settings = get_current_settings()
    database_path = prefect_settings.home / "prefect.db"
    connection_url = prefect_settings.server.database.connection_url
    if connection_url is None or connection_url.get_secret_value() != f"sqlite+aiosqlite:///{database_path}":
        return
    prefect_settings.server.database.migrate_on_start = False
    prefect_settings.home.mkdir(parents=True, exist_ok=True)
    version_path = database_path.with_suffix(".version")
    template_path = _cache_folder() / f"prefect-{prefect.__version__}.db"
    with FileLock(prefect_settings.home / ".migration.lock"):  # two runs may create the database at the same time
        is_new_database = not database_path.is_file()
        if not is_new_database and version_path.is_file() and version_path.read_text() == prefect.__version__:
            return
        if is_new_database and template_path.is_file():
            _copy_database(template_path, database_path)
        else:
            from prefect.server.database import provide_database_interface

            asyncio.run(provide_database_interface().create_db())
            if is_new_database:
                with suppress(OSError):  # without a writable cache, each new workspace is migrated from an empty database
                    template_path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                    _copy_database(database_path, template_path)
        version_path.write_text(prefect.__version__)


def enable_flow_run_vacuum() -> None:
    """Make the server delete old flow runs, with their logs and artifacts, in the background once after its start.

    Prefect has a service for this, which PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED enables. By default, an embedded server
    never runs the service.
    """
    from prefect.server.services.db_vacuum import schedule_orphan_vacuum_tasks, schedule_vacuum_tasks
    from prefect.server.services.perpetual_services import get_perpetual_services

    for service in get_perpetual_services():
        if service.function in (schedule_vacuum_tasks, schedule_orphan_vacuum_tasks):
            service.run_in_ephemeral = True


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nightjar"


def _copy_database(source_path: Path, target_path: Path) -> None:
    """Copy a sqlite database atomically."""
    with (
        atomic_replacement(target_path) as temporary_path,
        closing(sqlite3.connect(source_path)) as source_database,
        closing(sqlite3.connect(temporary_path)) as target_database,
    ):
        source_database.backup(target_database)


if __name__ == "__main__":
    main()
