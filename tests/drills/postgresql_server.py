"""A temporary PostgreSQL server on loopback with the databases of infra/compose.yaml."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.drills.production_servers import DATABASE_PASSWORDS, ROOT
from tests.drills.restartable_server import free_port

PROGRAMS = ("initdb", "pg_ctl", "psql")
ADMIN_PASSWORD = "admin-pa55-21b7"  # noqa: S105 the server lives for one test


def is_installed() -> bool:
    return all(shutil.which(program) for program in PROGRAMS)


class PostgresqlServer:
    """A PostgreSQL server. PostgreSQL refuses to run as root, so root starts it as the user `postgres`."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self._folder = folder
        self._user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"] if os.geteuid() == 0 else []
        if self._user:
            shutil.chown(folder, "postgres", "postgres")
        password_file = folder / "password"
        password_file.write_text(ADMIN_PASSWORD)
        password_file.chmod(0o644)
        self._run("initdb", "--username=postgres", "--auth=scram-sha-256", f"--pwfile={password_file}", "--no-sync")
        with (folder / "data" / "postgresql.conf").open("a") as file:
            file.write(f"port = {self.port}\nlisten_addresses = '127.0.0.1'\nunix_socket_directories = '{folder}'\n")

    def start(self) -> None:
        self._run("pg_ctl", "--wait", "--log", str(self._folder / "server.log"), "start")

    def restart(self) -> None:
        """Restart the server, which ends all connections at once."""
        self._run("pg_ctl", "--wait", "--mode=fast", "--log", str(self._folder / "server.log"), "restart")

    def stop(self) -> None:
        self._run("pg_ctl", "--wait", "--mode=immediate", "stop")

    def create_databases(self) -> None:
        """Create roles and databases with the script of compose.yaml."""
        connection = {
            "PGHOST": "127.0.0.1",
            "PGPORT": str(self.port),
            "PGPASSWORD": ADMIN_PASSWORD,
            "POSTGRES_USER": "postgres",
        }
        script = ROOT / "infra" / "compose" / "create-databases.sh"
        subprocess.run([script], env=os.environ | connection | DATABASE_PASSWORDS, check=True, capture_output=True)

    def query(self, database: str, sql: str) -> str:
        """Return the output of `sql`, executed with the role that owns `database`."""
        password = DATABASE_PASSWORDS[f"{database.upper()}_DATABASE_PASSWORD"]
        command = ["psql", "--host=127.0.0.1", f"--port={self.port}", f"--username={database}", f"--dbname={database}"]
        command += ["--tuples-only", "--no-align", f"--command={sql}"]
        environment = os.environ | {"PGPASSWORD": password}
        result = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        return result.stdout.strip()

    def _run(self, program: str, *arguments: str) -> None:
        command = [*self._user, program, "--pgdata", str(self._folder / "data"), *arguments]
        with (self._folder / "commands.log").open("ab") as log:  # the server inherits this output and keeps it open
            subprocess.run(command, check=True, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=self._folder)


@contextmanager
def postgresql_server() -> Iterator[PostgresqlServer]:
    """Start a server with the databases of Prefect and MLflow; remove it and its files at the end."""
    folder = Path(tempfile.mkdtemp(prefix="nightjar-postgresql-"))  # the user postgres may not read the folders of pytest
    try:
        server = PostgresqlServer(folder)
        server.start()
        try:
            server.create_databases()
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder)
