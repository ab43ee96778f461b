"""Process of the embedded Prefect server: `python -m flows.prefect_process FD`, where FD is a listening socket.

The process imports Prefect's libraries while the command reads its config. It imports Prefect itself after it has received its
environment on stdin, because Prefect reads its settings at import.
"""

import os
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

from flows.server_process import GRACE_S, receive_start
from recsys_core.atomic import atomic_replacement
from recsys_core.imports import fast_imports
from recsys_core.parent_process import die_with_parent


def main() -> None:
    """Serve Prefect's API on the socket until SIGTERM, or until the parent process ends."""
    die_with_parent()
    with fast_imports():
        _import_libraries()
        listener = receive_start()
        if listener is None:
            return
        import uvicorn

        migrate()
        vacuum_flow_runs()
        from prefect.server.api.server import create_app

        config = uvicorn.Config(create_app(), log_level="error", lifespan="on", timeout_graceful_shutdown=GRACE_S)
    uvicorn.Server(config).run(sockets=[listener])


def _import_libraries() -> None:
    """Import the libraries of Prefect that do not read Prefect's settings."""
    import docket  # noqa: F401
    import fastapi  # noqa: F401
    import uvicorn  # noqa: F401


def migrate() -> None:
    """Migrate the database in PREFECT_HOME to the schema of the installed Prefect.

    A new database is copied from the user's cache, because Prefect's migrations of an empty database take seconds. A database
    that the user has configured elsewhere is migrated by Prefect itself.
    """
    import asyncio

    import prefect
    from filelock import FileLock
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    database = settings.home / "prefect.db"
    url = settings.server.database.connection_url
    if url is None or url.get_secret_value() != f"sqlite+aiosqlite:///{database}":
        return
    settings.server.database.migrate_on_start = False
    settings.home.mkdir(parents=True, exist_ok=True)
    version_file, template = database.with_suffix(".version"), _cache_folder() / f"prefect-{prefect.__version__}.db"
    with FileLock(settings.home / ".migration.lock"):  # two runs may create the database at the same time
        is_new = not database.is_file()
        if not is_new and version_file.is_file() and version_file.read_text() == prefect.__version__:
            return
        if is_new and template.is_file():
            _copy_database(template, database)
        else:
            from prefect.server.database import provide_database_interface

            asyncio.run(provide_database_interface().create_db())
            if is_new:
                with suppress(OSError):  # without a writable cache, each new workspace is migrated from an empty database
                    template.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                    _copy_database(database, template)
        version_file.write_text(prefect.__version__)


def vacuum_flow_runs() -> None:
    """Let the server delete old flow runs, with their logs and artifacts, once after its start and in the background.

    PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED enables this service of Prefect. In an embedded server, Prefect would not run it.
    """
    from prefect.server.services.db_vacuum import schedule_orphan_vacuum_tasks, schedule_vacuum_tasks
    from prefect.server.services.perpetual_services import get_perpetual_services

    for service in get_perpetual_services():
        if service.function in (schedule_vacuum_tasks, schedule_orphan_vacuum_tasks):
            service.run_in_ephemeral = True


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nightjar"


def _copy_database(source: Path, target: Path) -> None:
    """Copy a sqlite database atomically."""
    with (
        atomic_replacement(target) as temporary,
        closing(sqlite3.connect(source)) as source_database,
        closing(sqlite3.connect(temporary)) as target_database,
    ):
        source_database.backup(target_database)


if __name__ == "__main__":
    main()
