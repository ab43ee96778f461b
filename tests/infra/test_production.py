"""The deployment files for production: compose, Dockerfile, Kubernetes and systemd, checked without a container engine."""

import configparser
import json
import re
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any, get_args

import kubernetes.client
import pytest
from ruamel.yaml import YAML

from flows.runs.metrics_file import metrics_registry
from flows.settings.template import starter_config
from tasks.runs.context import StageContext
from tasks.runs.run import Run
from tasks.runs.run_record import RunFigures, RunRecord, RunState, record_run

ROOT = Path(__file__).resolve().parents[2]
INFRA = ROOT / "infra"
COMPOSE = YAML(typ="safe", pure=True).load((INFRA / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
SECRET_NAME = re.compile(r"PASSWORD|SECRET|TOKEN|AUTH_STRING|ACCESS_KEY")
DOCKERFILE = (INFRA / "Dockerfile").read_text()
K8S_FILES = sorted(path for path in (INFRA / "k8s").glob("*.yaml") if path.name not in ("kustomization.yaml", "nightly.yaml"))
KUBERNETES_OBJECTS = [document for path in K8S_FILES for document in YAML(typ="safe", pure=True).load_all(path.read_text())]
POD_SPECS = [document["spec"]["template"]["spec"] for document in KUBERNETES_OBJECTS if "template" in document.get("spec", {})]
UNIT_PATHS = sorted((INFRA / "systemd").glob("*.service"))


def host_path(volume: str) -> str:
    """Return the path or name of a volume on the host, with the defaults of its variables."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", volume).split(":", 1)[0]


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_a_versioned_image_local_ports_and_no_privileges(name: str) -> None:
    service = SERVICES[name]
    assert re.fullmatch(r"nightjar:(\$\{NIGHTJAR_TAG:-cpu\}|serve)|[a-z0-9/-]+:v?\d+\.\d+[\w.-]*", service["image"])
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    assert "no-new-privileges:true" in service["security_opt"]
    assert "privileged" not in service and service.get("network_mode") is None


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_refers_to_services_networks_volumes_and_files_that_exist(name: str) -> None:
    service = SERVICES[name]
    assert set(service.get("depends_on", ())) <= set(SERVICES)
    assert set(service["networks"]) <= set(COMPOSE["networks"])
    for volume in service.get("volumes", ()):
        source = host_path(volume)
        if source.startswith("./"):
            assert (INFRA / source).is_file(), f"{volume}: no such file"
        elif not source.startswith("../"):
            assert source in COMPOSE["volumes"]


@pytest.mark.parametrize("name", SERVICES)
def test_a_secret_of_a_service_comes_from_the_environment_and_no_command_contains_one(name: str) -> None:
    for variable, value in SERVICES[name].get("environment", {}).items():
        if SECRET_NAME.search(variable):
            assert re.fullmatch(r"\$\{[A-Z0-9_]+:\?[^}]*\}", value), f"{name}: {variable}"
    assert "${" not in json.dumps(SERVICES[name].get("command", ""))


def test_create_env_writes_each_secret_once_into_a_private_file(tmp_path: Path) -> None:
    script = tmp_path / "infra" / "compose" / "create-env.sh"
    script.parent.mkdir(parents=True)
    shutil.copy(INFRA / "compose" / "create-env.sh", script)
    subprocess.run([script], check=True, capture_output=True)
    env_path = tmp_path / "infra" / ".env"
    assert stat.S_IMODE(env_path.stat().st_mode) == 0o600
    secrets = dict(line.split("=", 1) for line in env_path.read_text().splitlines())
    assert set(secrets) == set(re.findall(r"\$\{(\w+):\?", (INFRA / "compose.yaml").read_text()))
    assert len(set(secrets.values())) == len(secrets) and min(map(len, secrets.values())) >= 8
    assert subprocess.run([script], check=False, capture_output=True).returncode == 2  # .env exists
    assert "infra/.env" in (ROOT / ".gitignore").read_text().splitlines()


def test_dashboard_and_alerts_use_metrics_that_nightjar_exports(tmp_path: Path) -> None:
    config = starter_config().with_absolute_paths(tmp_path)
    run = Run("20261121-000000-bbbb", workspace=config.workspace)
    run.folder.mkdir(parents=True)
    with record_run(StageContext(run, pipeline=config.name)) as ending:
        ending.set("Promoted", "first version")
    record = RunRecord.read(run)
    assert record is not None
    record.model_copy(update={"figures": RunFigures(version="1", promoted=True)}).write(run)
    exported_metrics = {family.name for family in metrics_registry(config).collect()}
    dashboard = (INFRA / "compose" / "grafana" / "nightjar.json").read_text()
    alerts = (INFRA / "compose" / "alerts.yaml").read_text()
    states_match = re.search(r'state=~"([\w|]+)"', alerts)
    assert states_match is not None and set(states_match[1].split("|")) <= set(get_args(RunState))
    used_metrics = set(re.findall(r"\bnightjar_\w+", dashboard + alerts))
    assert len(used_metrics) > 8 and used_metrics <= exported_metrics
    assert len({panel["id"] for panel in json.loads(dashboard)["panels"]}) == 8


def test_mlflow_gives_no_permission_by_default() -> None:
    for path in (INFRA / "compose" / "mlflow-auth.ini", INFRA / "k8s" / "mlflow-auth.ini"):
        settings = configparser.ConfigParser()
        settings.read(path)
        assert settings["mlflow"]["default_permission"] == "NO_PERMISSIONS"
        assert "password" not in settings["mlflow"]


def test_the_image_is_installed_from_the_locks_and_has_no_root_user() -> None:
    build_targets = re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.MULTILINE)
    assert build_targets == ["base", "build", "build-cpu", "build-gpu", "build-serve", "runtime", "gpu", "serve", "cpu"]
    assert set(re.findall(r"^FROM (\S+:\S+)", DOCKERFILE, re.MULTILINE)) == {"python:3.12.11-slim-bookworm"}
    assert re.findall(r"^USER (.*)$", DOCKERFILE, re.MULTILINE) == ["10001:10001"]
    assert re.findall(r"^RUN infra/install.sh \S+ (\w+) ", DOCKERFILE, re.MULTILINE) == ["cpu", "gpu", "serve"]
    pip_arguments = re.findall(r"pip install (.*)", DOCKERFILE)
    assert all("--no-deps" in arguments for arguments in pip_arguments)
    ignore_lines = (INFRA / "Dockerfile.dockerignore").read_text().splitlines()
    assert ignore_lines[1] == "*" and all((ROOT / line[1:]).exists() for line in ignore_lines if line.startswith("!"))


def unknown_keys(value: Any, kind: str, path: str) -> list[str]:
    """Return the dotted keys in `value` that are not in the Kubernetes API.

    Args:
        kind: class of kubernetes.client, such as V1Pod, or a list of it, such as list[V1Pod]. Other kinds have no known keys.
        path: dotted key of `value`.
    """
    if match := re.fullmatch(r"(?i:list)\[(.*)\]", kind):
        return [key for item in value for key in unknown_keys(item, match[1], path)]
    model = getattr(kubernetes.client, kind, None)
    if model is None or not isinstance(value, dict):
        return []
    attribute_by_key = {name: attribute for attribute, name in model.attribute_map.items()}
    unknown = [f"{path}.{key}" for key in value if key not in attribute_by_key]
    return unknown + [
        inner_key
        for key, item in value.items()
        if key in attribute_by_key
        for inner_key in unknown_keys(item, model.openapi_types[attribute_by_key[key]], f"{path}.{key}")
    ]


@pytest.mark.parametrize(
    "document", KUBERNETES_OBJECTS, ids=lambda document: f"{document['kind']}-{document['metadata']['name']}"
)
def test_a_kubernetes_object_has_only_keys_of_the_api(document: dict[str, Any]) -> None:
    kind = document["kind"]
    assert unknown_keys(document, f"V1{kind}", kind) == []


def test_the_database_of_the_prefect_server_is_on_a_persistent_volume() -> None:
    service = COMPOSE["services"]["prefect"]
    (volume,) = service["volumes"]
    source, _, mount_path = volume.partition(":")
    assert source in COMPOSE["volumes"] and service["environment"]["PREFECT_HOME"].startswith(f"{mount_path}/")
    (pod,) = (pod for pod in POD_SPECS if pod["containers"][0]["name"] == "prefect")
    claims = {volume["name"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume}
    mount_paths = [mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"] if mount["name"] in claims]
    (home,) = (variable["value"] for variable in pod["containers"][0]["env"] if variable["name"] == "PREFECT_HOME")
    assert any(home.startswith(f"{mount_path}/") for mount_path in mount_paths)


@pytest.mark.parametrize("pod", POD_SPECS, ids=lambda pod: pod["containers"][0]["name"])
def test_a_pod_has_no_root_user_no_token_and_bounded_memory(pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] and pod["automountServiceAccountToken"] is False
    security = container["securityContext"]
    assert security["readOnlyRootFilesystem"] and security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert "memory" in container["resources"]["limits"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_pods_read_secrets_from_keys_of_the_kubernetes_secret_and_contain_no_values() -> None:
    secret_keys = {
        line.split("=")[0] for line in (INFRA / "k8s" / "secret.env.example").read_text().splitlines() if "=" in line[:60]
    }
    for pod in POD_SPECS:
        for variable in pod["containers"][0]["env"]:
            reference = variable.get("valueFrom", {}).get("secretKeyRef")
            if reference is not None:
                assert reference["name"] == "nightjar" and reference["key"] in secret_keys
            else:
                assert not SECRET_NAME.search(variable["name"])


def test_services_of_the_cluster_have_no_external_address() -> None:
    services = [document["spec"] for document in KUBERNETES_OBJECTS if document["kind"] == "Service"]
    assert services and all("type" not in spec for spec in services)
    assert any(document["kind"] == "NetworkPolicy" and document["spec"]["podSelector"] == {} for document in KUBERNETES_OBJECTS)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_renders_all_objects_in_one_namespace() -> None:
    rendered_yaml = subprocess.run(
        ["kubectl", "kustomize", str(INFRA / "k8s")], check=True, capture_output=True, text=True
    ).stdout
    objects = list(YAML(typ="safe", pure=True).load_all(rendered_yaml))
    assert len(objects) == len(KUBERNETES_OBJECTS) + 2  # the two config maps
    assert {document["metadata"].get("namespace", "nightjar") for document in objects} == {"nightjar"}


@pytest.mark.parametrize("unit", UNIT_PATHS, ids=lambda unit: unit.name)
def test_a_unit_has_no_privileges_and_no_secret(unit: Path) -> None:
    named_values = re.findall(r"^([A-Za-z]+)=(.*)$", unit.read_text(), re.MULTILINE)
    value_by_name = dict(named_values)
    assert value_by_name["User"] == "nightjar"
    assert value_by_name["NoNewPrivileges"] == "true" and value_by_name["ProtectSystem"] == "strict"
    # With `mixed`, systemd sends SIGTERM only to the main process, and then kills its children. `nightjar up` ends its children
    # itself. A worker does not, and one of its children reports that a run was killed.
    assert value_by_name["KillMode"] == ("mixed" if "up" in unit.stem else "control-group")
    assert int(value_by_name["TimeoutStopSec"]) >= 60
    assert not any(SECRET_NAME.search(value) for name, value in named_values if name == "Environment")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("unit", UNIT_PATHS, ids=lambda unit: unit.name)
def test_systemd_accepts_a_unit_and_rates_its_exposure_as_low(unit: Path, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit_copy = tmp_path / unit.name
    unit_copy.write_text(re.sub(r"/opt/nightjar/venv/bin/\w+", str(program), unit.read_text()))
    verification = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit_copy)], check=False, capture_output=True, text=True
    )
    assert [line for line in verification.stderr.splitlines() if unit.name in line] == []
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(unit_copy)]
    exposure_match = re.search(
        r"exposure level for \S+: ([\d.]+)", subprocess.run(command, capture_output=True, text=True).stdout
    )
    assert exposure_match is not None and float(exposure_match[1]) < 2.5  # of 10
