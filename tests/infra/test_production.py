"""The files of the production shape: compose, Dockerfile, Kubernetes and systemd, checked without a container engine."""

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
SECRET = re.compile(r"PASSWORD|SECRET|TOKEN|AUTH_STRING|ACCESS_KEY")
DOCKERFILE = (INFRA / "Dockerfile").read_text()
K8S_FILES = sorted(path for path in (INFRA / "k8s").glob("*.yaml") if path.name not in ("kustomization.yaml", "nightly.yaml"))
OBJECTS = [document for path in K8S_FILES for document in YAML(typ="safe", pure=True).load_all(path.read_text())]
PODS = [document["spec"]["template"]["spec"] for document in OBJECTS if "template" in document.get("spec", {})]
UNITS = sorted((INFRA / "systemd").glob("*.service"))


def host_path(volume: str) -> str:
    """Return the part of a volume before its mount point."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", volume).split(":", 1)[0]


@pytest.mark.parametrize("name", SERVICES)
def test_an_image_has_a_version_and_its_ports_are_on_loopback(name: str) -> None:
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
def test_a_secret_comes_from_the_environment_and_is_never_in_a_command(name: str) -> None:
    for variable, value in SERVICES[name].get("environment", {}).items():
        if SECRET.search(variable):
            assert re.fullmatch(r"\$\{[A-Z0-9_]+:\?[^}]*\}", value), f"{name}: {variable}"
    assert "${" not in json.dumps(SERVICES[name].get("command", ""))


def test_create_env_writes_each_secret_of_compose_once_and_for_its_owner_only(tmp_path: Path) -> None:
    script = tmp_path / "infra" / "compose" / "create-env.sh"
    script.parent.mkdir(parents=True)
    shutil.copy(INFRA / "compose" / "create-env.sh", script)
    subprocess.run([script], check=True, capture_output=True)
    file = tmp_path / "infra" / ".env"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    secrets = dict(line.split("=", 1) for line in file.read_text().splitlines())
    assert set(secrets) == set(re.findall(r"\$\{(\w+):\?", (INFRA / "compose.yaml").read_text()))
    assert len(set(secrets.values())) == len(secrets) and min(map(len, secrets.values())) >= 8
    assert subprocess.run([script], check=False, capture_output=True).returncode == 2
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
    exported = {family.name for family in metrics_registry(config).collect()}
    dashboard = (INFRA / "compose" / "grafana" / "nightjar.json").read_text()
    alerts = (INFRA / "compose" / "alerts.yaml").read_text()
    states = re.search(r'state=~"([\w|]+)"', alerts)
    assert states is not None and set(states[1].split("|")) <= set(get_args(RunState))
    used = set(re.findall(r"\bnightjar_\w+", dashboard + alerts))
    assert len(used) > 8 and used <= exported
    assert len({panel["id"] for panel in json.loads(dashboard)["panels"]}) == 8


def test_mlflow_gives_no_permission_by_default() -> None:
    for file in (INFRA / "compose" / "mlflow-auth.ini", INFRA / "k8s" / "mlflow-auth.ini"):
        settings = configparser.ConfigParser()
        settings.read(file)
        assert settings["mlflow"]["default_permission"] == "NO_PERMISSIONS"
        assert "password" not in settings["mlflow"]


def test_the_image_is_installed_from_the_locks_and_has_no_root_user() -> None:
    targets = re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.MULTILINE)
    assert targets == ["base", "build", "build-cpu", "build-gpu", "build-serve", "runtime", "gpu", "serve", "cpu"]
    assert set(re.findall(r"^FROM (\S+:\S+)", DOCKERFILE, re.MULTILINE)) == {"python:3.12.11-slim-bookworm"}
    assert re.findall(r"^USER (.*)$", DOCKERFILE, re.MULTILINE) == ["10001:10001"]
    assert re.findall(r"^RUN infra/install.sh \S+ (\w+) ", DOCKERFILE, re.MULTILINE) == ["cpu", "gpu", "serve"]
    installs = re.findall(r"pip install (.*)", DOCKERFILE)
    assert all("--no-deps" in install for install in installs)
    ignored = (INFRA / "Dockerfile.dockerignore").read_text().splitlines()
    assert ignored[1] == "*" and all((ROOT / line[1:]).exists() for line in ignored if line.startswith("!"))


def unknown_keys(value: Any, kind: str, path: str) -> list[str]:
    """Return the keys of `value` that the Kubernetes API does not have. kind: name of a model, or List[...] of one."""
    if match := re.fullmatch(r"(?i:list)\[(.*)\]", kind):
        return [key for item in value for key in unknown_keys(item, match[1], path)]
    model = getattr(kubernetes.client, kind, None)
    if model is None or not isinstance(value, dict):
        return []
    names = {name: attribute for attribute, name in model.attribute_map.items()}
    unknown = [f"{path}.{key}" for key in value if key not in names]
    return unknown + [
        found
        for key, item in value.items()
        if key in names
        for found in unknown_keys(item, model.openapi_types[names[key]], f"{path}.{key}")
    ]


@pytest.mark.parametrize("document", OBJECTS, ids=lambda document: f"{document['kind']}-{document['metadata']['name']}")
def test_a_kubernetes_object_has_only_keys_of_the_api(document: dict[str, Any]) -> None:
    kind = document["kind"]
    assert unknown_keys(document, f"V1{kind}", kind) == []


def test_the_leases_of_runs_survive_a_restart_of_the_prefect_server() -> None:
    service = COMPOSE["services"]["prefect"]
    (volume,) = service["volumes"]
    source, _, mount_path = volume.partition(":")
    assert source in COMPOSE["volumes"] and service["environment"]["PREFECT_HOME"].startswith(f"{mount_path}/")
    (pod,) = (pod for pod in PODS if pod["containers"][0]["name"] == "prefect")
    claims = {volume["name"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume}
    mount_paths = [mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"] if mount["name"] in claims]
    (home,) = (variable["value"] for variable in pod["containers"][0]["env"] if variable["name"] == "PREFECT_HOME")
    assert any(home.startswith(f"{mount_path}/") for mount_path in mount_paths)


@pytest.mark.parametrize("pod", PODS, ids=lambda pod: pod["containers"][0]["name"])
def test_a_pod_has_no_root_user_no_token_and_bounded_memory(pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] and pod["automountServiceAccountToken"] is False
    security = container["securityContext"]
    assert security["readOnlyRootFilesystem"] and security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert "memory" in container["resources"]["limits"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_secrets_of_pods_are_keys_of_the_secret_and_never_values() -> None:
    keys = {line.split("=")[0] for line in (INFRA / "k8s" / "secret.env.example").read_text().splitlines() if "=" in line[:60]}
    for pod in PODS:
        for variable in pod["containers"][0]["env"]:
            reference = variable.get("valueFrom", {}).get("secretKeyRef")
            if reference is not None:
                assert reference["name"] == "nightjar" and reference["key"] in keys
            else:
                assert not SECRET.search(variable["name"])


def test_services_of_the_cluster_are_not_reachable_from_outside() -> None:
    services = [document["spec"] for document in OBJECTS if document["kind"] == "Service"]
    assert services and all("type" not in spec for spec in services)
    assert any(document["kind"] == "NetworkPolicy" and document["spec"]["podSelector"] == {} for document in OBJECTS)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_renders_all_objects_in_one_namespace() -> None:
    rendered = subprocess.run(["kubectl", "kustomize", str(INFRA / "k8s")], check=True, capture_output=True, text=True).stdout
    objects = list(YAML(typ="safe", pure=True).load_all(rendered))
    assert len(objects) == len(OBJECTS) + 2  # the two config maps
    assert {item["metadata"].get("namespace", "nightjar") for item in objects} == {"nightjar"}


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_has_no_privileges_and_no_secret(unit: Path) -> None:
    settings = re.findall(r"^([A-Za-z]+)=(.*)$", unit.read_text(), re.MULTILINE)
    values = dict(settings)
    assert values["User"] == "nightjar" and values["NoNewPrivileges"] == "true" and values["ProtectSystem"] == "strict"
    # `nightjar up` ends its own processes. A worker does not: with `mixed`, systemd would kill the report of a killed run.
    assert values["KillMode"] == ("mixed" if "up" in unit.stem else "control-group") and int(values["TimeoutStopSec"]) >= 60
    assert not any(SECRET.search(value) for name, value in settings if name == "Environment")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_accepts_a_unit(unit: Path, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    copy = tmp_path / unit.name
    copy.write_text(re.sub(r"/opt/nightjar/venv/bin/\w+", str(program), unit.read_text()))
    verified = subprocess.run(["systemd-analyze", "verify", "--man=no", str(copy)], check=False, capture_output=True, text=True)
    assert [line for line in verified.stderr.splitlines() if unit.name in line] == []
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(copy)]
    exposure = re.search(r"exposure level for \S+: ([\d.]+)", subprocess.run(command, capture_output=True, text=True).stdout)
    assert exposure is not None and float(exposure[1]) < 2.5
