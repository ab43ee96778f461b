"""Secrets of the environment do not get into files, databases, logs, messages or command lines: `make drills`.

A run fails at the registration (wrong password) and is resumed with the right one. Another run warns about an MLflow database
that does not answer. An embedded Prefect server fails to start on a database that does not answer.
"""

import base64
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import psutil
import pytest

from tests.drills.production_servers import (
    PREFECT_LOGIN,
    SECRETS,
    USER_PASSWORD,
    Servers,
    clean_environment,
    production_servers,
)
from tests.drills.test_kill_and_resume import write_config

pytestmark = pytest.mark.drill
NIGHTJAR = [sys.executable, "-m", "flows.cli"]
RUN_ID = "20260101-000000-5ec2"
WRONG_PASSWORD, DATABASE_PASSWORD, STORE_KEY = "wrong-pa55-31d0", "database-pa55/8e@1", "store-key-c4fe"
PLANTED_SECRETS = (
    *(value.rpartition(":")[2] for name, value in SECRETS.items() if name != "S3_ACCESS_KEY"),
    *(WRONG_PASSWORD, DATABASE_PASSWORD, STORE_KEY),
)


def encodings(secret: str) -> set[bytes]:
    """Return the secret as text, quoted for a URL, and as part of base64 logins.

    The last characters of a base64 login depend on the text after the login and are left out.
    """
    logins = (f"nightjar:{secret}", f"ada:{secret}")
    encoded = {base64.b64encode(login.encode())[: 4 * (len(login) // 3)] for login in logins}
    return {secret.encode(), quote(secret, safe="").encode(), *encoded}


SECRET_BY_ENCODING = {encoding: secret for secret in PLANTED_SECRETS for encoding in encodings(secret)}


def secrets_in(content: bytes) -> list[str]:
    """Return the planted secrets that `content` contains in some encoding."""
    return sorted({secret for encoding, secret in SECRET_BY_ENCODING.items() if encoding in content})


@contextmanager
def watched_command_lines(leaks: dict[str, list[str]]) -> Iterator[None]:
    """Read the command lines of all processes every 0.2 s; add each one that contains a secret to `leaks`."""
    stopping = threading.Event()

    def watch() -> None:
        while not stopping.wait(0.2):
            for process in psutil.process_iter(["cmdline"]):
                command = " ".join(process.info["cmdline"] or ())
                if leaked_secrets := secrets_in(command.encode(errors="replace")):
                    leaks[command] = leaked_secrets

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()


def nightjar(*arguments: str, environment: Mapping[str, str]) -> "subprocess.CompletedProcess[bytes]":
    command = [*NIGHTJAR, *arguments]
    return subprocess.run(command, env=dict(environment), capture_output=True, timeout=1200, check=False)


def test_the_search_finds_each_form_of_a_secret() -> None:
    for secret in PLANTED_SECRETS:
        login = base64.b64encode(f"nightjar:{secret}".encode())
        for text in (secret.encode(), quote(secret, safe="").encode(), b"Authorization: Basic " + login):
            assert secrets_in(b"before" + text + b"after") == [secret]


def test_no_secret_is_in_a_file_an_output_or_a_command_line(tmp_path: Path) -> None:
    server_folder, folder = tmp_path / "servers", tmp_path / "user"
    server_folder.mkdir()
    folder.mkdir()
    config_path = write_config(folder)
    leaks: dict[str, list[str]] = {}
    outputs: dict[str, subprocess.CompletedProcess[bytes]] = {}
    with watched_command_lines(leaks), production_servers(server_folder) as servers:
        start_time = time.monotonic()
        verbose_environment = environment_with_secrets(servers, WRONG_PASSWORD) | {
            "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "INFO"
        }
        outputs["wrong password"] = nightjar("run", str(config_path), environment=verbose_environment)
        user_environment = environment_with_secrets(servers, USER_PASSWORD)
        (run_folder,) = (folder / "workspace" / "runs").iterdir()
        outputs["resumed"] = nightjar(
            "run", str(config_path), "--resume", run_folder.name, "--json", environment=user_environment
        )
        outputs["doctor"] = nightjar("doctor", str(config_path), environment=user_environment)
        outputs["query"] = nightjar("query", str(config_path), "--user", "1", environment=user_environment)
        database = f"postgresql+psycopg://ada:{quote(DATABASE_PASSWORD, safe='')}@127.0.0.1:9/mlflow"
        unreachable_environment = user_environment | {"MLFLOW_TRACKING_URI": database}
        outputs["no database"] = nightjar("run", str(config_path), "--until", "check_data", environment=unreachable_environment)
        outputs["no database, releases"] = nightjar("releases", str(config_path), environment=unreachable_environment)
        embedded_environment = clean_environment() | {
            "PREFECT_API_DATABASE_CONNECTION_URL": database.replace("+psycopg", "+asyncpg"),
            "PREFECT_SERVER_DATABASE_CONNECTION_URL": database.replace("+psycopg", "+asyncpg"),
        }
        outputs["no Prefect"] = nightjar("run", str(config_path), "--until", "check_data", environment=embedded_environment)
        print(f"{time.monotonic() - start_time:.0f} s")  # noqa: T201 shown with -s
    exit_codes = {name: output.returncode for name, output in outputs.items()}
    errors = {name: output.stderr.decode()[-2000:] for name, output in outputs.items()}
    assert exit_codes["wrong password"] == 1 and b"401" in outputs["wrong password"].stderr, errors
    assert exit_codes["resumed"] == 0 and json.loads(outputs["resumed"].stdout.splitlines()[-1])["model"]["version"] == "1", (
        errors
    )
    assert exit_codes["query"] == 0 and exit_codes["no database"] == 0, errors
    assert exit_codes["no database, releases"] == 1 and exit_codes["no Prefect"] == 1, errors

    for name, output in outputs.items():
        if leaked_secrets := secrets_in(output.stdout + output.stderr):
            leaks[f"output of {name}"] = leaked_secrets
    files = [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(files) > 100
    leaks |= {str(path.relative_to(tmp_path)): secrets for path in files if (secrets := secrets_in(path.read_bytes()))}
    assert leaks == {}


def environment_with_secrets(servers: Servers, password: str) -> dict[str, str]:
    """Return a user's environment with a password in the tracking URI, keys of an object store and the login of Prefect."""
    environment = dict(servers.environment)
    del environment["MLFLOW_TRACKING_USERNAME"], environment["MLFLOW_TRACKING_PASSWORD"]
    return environment | {
        "MLFLOW_TRACKING_URI": servers.mlflow.replace("//", f"//nightjar:{password}@"),
        "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE",
        "AWS_SECRET_ACCESS_KEY": STORE_KEY,
        "PREFECT_API_AUTH_STRING": PREFECT_LOGIN,
    }
