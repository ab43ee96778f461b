"""The Prefect and MLflow servers of infra/compose.yaml as processes on loopback."""

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ruamel.yaml import YAML

from tests.drills.restartable_server import RestartableServer, clean_environment, free_port, running

ROOT = Path(__file__).resolve().parents[2]
SERVICES = YAML(typ="safe", pure=True).load((ROOT / "infra" / "compose.yaml").read_text())["services"]
USER_PASSWORD, PREFECT_LOGIN = "mlflow-pa55-4f1c", "nightjar:prefect-pa55-90b2"
DATABASE_PASSWORDS = {"PREFECT_DATABASE_PASSWORD": "prefect-db-pa55-77aa", "MLFLOW_DATABASE_PASSWORD": "mlflow-db-pa55-c0de"}
SECRETS = {
    **DATABASE_PASSWORDS,
    "PREFECT_AUTH_STRING": PREFECT_LOGIN,
    "MLFLOW_PASSWORD": USER_PASSWORD,
    "MLFLOW_SECRET_KEY": "flask-key-1b7e",
    "S3_ACCESS_KEY": "s3-key-id-5ea1",
    "S3_SECRET_KEY": "s3-key-5ec2e7",
}


@dataclass(frozen=True)
class Servers:
    """Addresses of the servers, and the environment of a worker that uses them."""

    prefect: str
    mlflow: str
    environment: Mapping[str, str]


def service_environment(name: str) -> dict[str, str]:
    """Return the environment of a service of compose.yaml, with the secrets filled in."""
    settings = SERVICES[name]["environment"]
    settings_with_secrets = {
        key: re.sub(r"\$\{(\w+):\?[^}]*\}", lambda match: SECRETS[match[1]], value) for key, value in settings.items()
    }
    return {key: re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value) for key, value in settings_with_secrets.items()}


@contextmanager
def running_service(name: str, folder: Path, *, health_path: str, overrides: Mapping[str, str | None]) -> Iterator[str]:
    """Start a service of compose.yaml on loopback and yield its address. None in `overrides` removes the variable."""
    port = free_port()
    program, *arguments = SERVICES[name]["command"]
    replacements = {
        "0.0.0.0": "127.0.0.1",
        "4200": str(port),
        "5000": str(port),
        "2": "1",
    }  # 1 instead of 2 workers start faster
    arguments = [replacements.get(text, text) for text in arguments]
    settings = clean_environment() | service_environment(name) | overrides
    if name == "prefect":
        settings["PREFECT_SERVER_UI_API_URL"] = f"http://127.0.0.1:{port}/api"
    environment = {key: value for key, value in settings.items() if value is not None}
    server = RestartableServer(
        [program, *arguments], port=port, health_path=health_path, environment=environment, log_file=folder / f"{name}.log"
    )
    with running(server):
        yield server.address


@contextmanager
def production_servers(folder: Path, *, postgresql_port: int | None = None, s3_address: str | None = None) -> Iterator[Servers]:
    """Start the Prefect and the MLflow server, both with passwords. Their files are in `folder`.

    Args:
        postgresql_port: port of the PostgreSQL server of both. With None, their databases are sqlite files.
        s3_address: address of the S3 server whose bucket holds MLflow's artifacts. With None, the artifacts are in `folder`.
    """
    auth_config = (ROOT / "infra" / "compose" / "mlflow-auth.ini").read_text().replace("/var/lib/nightjar", str(folder))
    (folder / "mlflow-auth.ini").write_text(auth_config)
    prefect_overrides: dict[str, str | None] = {"PREFECT_HOME": str(folder / "prefect")}
    mlflow_overrides: dict[str, str | None] = {
        "MLFLOW_AUTH_CONFIG_PATH": str(folder / "mlflow-auth.ini"),
        "MLFLOW_SERVER_ALLOWED_HOSTS": "127.0.0.1:*",
        "AWS_ENDPOINT_URL": s3_address,
    }
    if s3_address is None:
        mlflow_overrides["MLFLOW_ARTIFACTS_DESTINATION"] = str(folder / "artifacts")
    if postgresql_port is None:
        prefect_overrides |= {
            name: None for name in service_environment("prefect") if name.startswith("PREFECT_SERVER_DATABASE_")
        }
        mlflow_overrides |= {"MLFLOW_BACKEND_STORE_URI": f"sqlite:///{folder}/mlflow-server.db", "PGPASSWORD": None}
    else:
        prefect_overrides |= {"PREFECT_SERVER_DATABASE_HOST": "127.0.0.1", "PREFECT_SERVER_DATABASE_PORT": str(postgresql_port)}
        mlflow_overrides["MLFLOW_BACKEND_STORE_URI"] = f"postgresql+psycopg://mlflow@127.0.0.1:{postgresql_port}/mlflow"
    with ExitStack() as stack:
        prefect_address = stack.enter_context(
            running_service("prefect", folder, health_path="/api/health", overrides=prefect_overrides)
        )
        mlflow_address = stack.enter_context(
            running_service("mlflow", folder, health_path="/health", overrides=mlflow_overrides)
        )
        worker_environment = service_environment("worker") | {
            "PREFECT_HOME": str(folder / "prefect-client"),
            "PREFECT_API_URL": f"{prefect_address}/api",
            "MLFLOW_TRACKING_URI": mlflow_address,
        }
        yield Servers(prefect_address, mlflow_address, clean_environment() | worker_environment)
