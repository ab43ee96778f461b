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
INFRA_FOLDER = ROOT / "infra"
COMPOSE = YAML(typ="safe", pure=True).load((INFRA_FOLDER / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
SECRET_NAME_PATTERN = re.compile(r"PASSWORD|SECRET|TOKEN|AUTH_STRING|ACCESS_KEY")
DOCKERFILE_TEXT = (INFRA_FOLDER / "Dockerfile").read_text()
KUBERNETES_PATHS = sorted(
    path for path in (INFRA_FOLDER / "k8s").glob("*.yaml") if path.name not in ("kustomization.yaml", "nightly.yaml")
)
KUBERNETES_OBJECTS = [
    document for path in KUBERNETES_PATHS for document in YAML(typ="safe", pure=True).load_all(path.read_text())
]
POD_SPECS = [document["spec"]["template"]["spec"] for document in KUBERNETES_OBJECTS if "template" in document.get("spec", {})]
UNIT_PATHS = sorted((INFRA_FOLDER / "systemd").glob("*.service"))


def volume_host_source(volume: str) -> str:
    """Return the host side of a volume, for example `./data` for `${DATA:-./data}:/data`."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", volume).split(":", 1)[0]


@pytest.mark.parametrize("service_name", SERVICES)
def test_a_service_has_a_versioned_image_local_ports_and_no_privileges(service_name: str) -> None:
    service = SERVICES[service_name]
    assert re.fullmatch(r"nightjar:(\$\{NIGHTJAR_TAG:-cpu\}|serve)|[a-z0-9/-]+:v?\d+\.\d+[\w.-]*", service["image"])
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    assert "no-new-privileges:true" in service["security_opt"]
    assert "privileged" not in service and service.get("network_mode") is None


@pytest.mark.parametrize("service_name", SERVICES)
def test_a_service_refers_to_services_networks_volumes_and_files_that_exist(service_name: str) -> None:
    service = SERVICES[service_name]
    assert set(service.get("depends_on", ())) <= set(SERVICES)
    assert set(service["networks"]) <= set(COMPOSE["networks"])
    for volume in service.get("volumes", ()):
        volume_source = volume_host_source(volume)
        if volume_source.startswith("./"):
            assert (INFRA_FOLDER / volume_source).is_file(), f"{volume}: no such file"
        elif not volume_source.startswith("../"):
            assert volume_source in COMPOSE["volumes"]


@pytest.mark.parametrize("service_name", SERVICES)
def test_a_secret_of_a_service_comes_from_the_environment_and_no_command_contains_one(service_name: str) -> None:
    for variable, value in SERVICES[service_name].get("environment", {}).items():
        if SECRET_NAME_PATTERN.search(variable):
            assert re.fullmatch(r"\$\{[A-Z0-9_]+:\?[^}]*\}", value), f"{service_name}: {variable}"
    assert "${" not in json.dumps(SERVICES[service_name].get("command", ""))


def test_create_env_writes_each_secret_once_into_a_private_file(tmp_path: Path) -> None:
    script_path = tmp_path / "infra" / "compose" / "create-env.sh"
    script_path.parent.mkdir(parents=True)
    shutil.copy(INFRA_FOLDER / "compose" / "create-env.sh", script_path)
    subprocess.run([script_path], check=True, capture_output=True)
    env_path = tmp_path / "infra" / ".env"
    assert stat.S_IMODE(env_path.stat().st_mode) == 0o600
    secret_by_name = dict(line.split("=", 1) for line in env_path.read_text().splitlines())
    assert set(secret_by_name) == set(re.findall(r"\$\{(\w+):\?", (INFRA_FOLDER / "compose.yaml").read_text()))
    assert len(set(secret_by_name.values())) == len(secret_by_name) and min(map(len, secret_by_name.values())) >= 8
    assert subprocess.run([script_path], check=False, capture_output=True).returncode == 2  # .env exists
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
    dashboard = (INFRA_FOLDER / "compose" / "grafana" / "nightjar.json").read_text()
    alerts = (INFRA_FOLDER / "compose" / "alerts.yaml").read_text()
    states_match = re.search(r'state=~"([\w|]+)"', alerts)
    assert states_match is not None and set(states_match[1].split("|")) <= set(get_args(RunState))
    used_metrics = set(re.findall(r"\bnightjar_\w+", dashboard + alerts))
    assert len(used_metrics) > 8 and used_metrics <= exported_metrics
    assert len({panel["id"] for panel in json.loads(dashboard)["panels"]}) == 8


def test_mlflow_gives_no_permission_by_default() -> None:
    for path in (INFRA_FOLDER / "compose" / "mlflow-auth.ini", INFRA_FOLDER / "k8s" / "mlflow-auth.ini"):
        settings = configparser.ConfigParser()
        settings.read(path)
        assert settings["mlflow"]["default_permission"] == "NO_PERMISSIONS"
        assert "password" not in settings["mlflow"]


def test_the_image_is_installed_from_the_locks_and_has_no_root_user() -> None:
    build_targets = re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE_TEXT, re.MULTILINE)
    assert build_targets == ["base", "build", "build-cpu", "build-gpu", "build-serve", "runtime", "gpu", "serve", "cpu"]
    assert set(re.findall(r"^FROM (\S+:\S+)", DOCKERFILE_TEXT, re.MULTILINE)) == {"python:3.12.11-slim-bookworm"}
    assert re.findall(r"^USER (.*)$", DOCKERFILE_TEXT, re.MULTILINE) == ["10001:10001"]
    assert re.findall(r"^RUN infra/install.sh \S+ (\w+) ", DOCKERFILE_TEXT, re.MULTILINE) == ["cpu", "gpu", "serve"]
    pip_arguments = re.findall(r"pip install (.*)", DOCKERFILE_TEXT)
    assert all("--no-deps" in arguments for arguments in pip_arguments)
    ignore_lines = (INFRA_FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
    assert ignore_lines[1] == "*" and all((ROOT / line[1:]).exists() for line in ignore_lines if line.startswith("!"))


def unknown_keys(value: Any, class_name: str, path: str) -> list[str]:
    """Return the dotted keys in `value` that are not in the Kubernetes API.

    Args:
        class_name: class of kubernetes.client (`V1Pod`), or a list of such a class (`list[V1Pod]`). The keys of other types are
            not checked.
        path: dotted key of `value`.
    """
    if match := re.fullmatch(r"(?i:list)\[(.*)\]", class_name):
        return [key for inner_value in value for key in unknown_keys(inner_value, match[1], path)]
    api_class = getattr(kubernetes.client, class_name, None)
    if api_class is None or not isinstance(value, dict):
        return []
    attribute_by_key = {name: attribute for attribute, name in api_class.attribute_map.items()}
    own_unknown_keys = [f"{path}.{key}" for key in value if key not in attribute_by_key]
    return own_unknown_keys + [
        inner_key
        for key, inner_value in value.items()
        if key in attribute_by_key
        for inner_key in unknown_keys(inner_value, api_class.openapi_types[attribute_by_key[key]], f"{path}.{key}")
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
    volume_name, _, mount_path = volume.partition(":")
    assert volume_name in COMPOSE["volumes"] and service["environment"]["PREFECT_HOME"].startswith(f"{mount_path}/")
    (pod_spec,) = (pod_spec for pod_spec in POD_SPECS if pod_spec["containers"][0]["name"] == "prefect")
    claimed_volume_names = {volume["name"] for volume in pod_spec["volumes"] if "persistentVolumeClaim" in volume}
    mount_paths = [
        mount["mountPath"] for mount in pod_spec["containers"][0]["volumeMounts"] if mount["name"] in claimed_volume_names
    ]
    (prefect_home,) = (variable["value"] for variable in pod_spec["containers"][0]["env"] if variable["name"] == "PREFECT_HOME")
    assert any(prefect_home.startswith(f"{mount_path}/") for mount_path in mount_paths)


@pytest.mark.parametrize("pod_spec", POD_SPECS, ids=lambda pod_spec: pod_spec["containers"][0]["name"])
def test_a_pod_has_no_root_user_no_token_and_bounded_memory(pod_spec: dict[str, Any]) -> None:
    (container,) = pod_spec["containers"]
    assert pod_spec["securityContext"]["runAsNonRoot"] and pod_spec["automountServiceAccountToken"] is False
    container_security = container["securityContext"]
    assert container_security["readOnlyRootFilesystem"] and container_security["allowPrivilegeEscalation"] is False
    assert container_security["capabilities"] == {"drop": ["ALL"]}
    assert "memory" in container["resources"]["limits"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod_spec["volumes"]}


def test_pods_read_secrets_from_keys_of_the_kubernetes_secret_and_contain_no_values() -> None:
    secret_keys = {
        line.split("=")[0]
        for line in (INFRA_FOLDER / "k8s" / "secret.env.example").read_text().splitlines()
        if "=" in line[:60]
    }
    for pod_spec in POD_SPECS:
        for variable in pod_spec["containers"][0]["env"]:
            secret_reference = variable.get("valueFrom", {}).get("secretKeyRef")
            if secret_reference is not None:
                assert secret_reference["name"] == "nightjar" and secret_reference["key"] in secret_keys
            else:
                assert not SECRET_NAME_PATTERN.search(variable["name"])


def test_services_of_the_cluster_have_no_external_address() -> None:
    services = [document["spec"] for document in KUBERNETES_OBJECTS if document["kind"] == "Service"]
    assert services and all("type" not in spec for spec in services)
    assert any(document["kind"] == "NetworkPolicy" and document["spec"]["podSelector"] == {} for document in KUBERNETES_OBJECTS)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_renders_all_objects_in_one_namespace() -> None:
    rendered_yaml = subprocess.run(
        ["kubectl", "kustomize", str(INFRA_FOLDER / "k8s")], check=True, capture_output=True, text=True
    ).stdout
    objects = list(YAML(typ="safe", pure=True).load_all(rendered_yaml))
    assert len(objects) == len(KUBERNETES_OBJECTS) + 2  # the two config maps
    assert {document["metadata"].get("namespace", "nightjar") for document in objects} == {"nightjar"}


@pytest.mark.parametrize("unit_path", UNIT_PATHS, ids=lambda unit_path: unit_path.name)
def test_a_unit_has_no_privileges_and_no_secret(unit_path: Path) -> None:
    named_values = re.findall(r"^([A-Za-z]+)=(.*)$", unit_path.read_text(), re.MULTILINE)
    value_by_name = dict(named_values)
    assert value_by_name["User"] == "nightjar"
    assert value_by_name["NoNewPrivileges"] == "true" and value_by_name["ProtectSystem"] == "strict"
    # With `mixed`, systemd sends SIGTERM only to the main process. `nightjar up` ends its children itself. A worker does not,
    # and its child needs the SIGTERM to report that the run was killed.
    assert value_by_name["KillMode"] == ("mixed" if "up" in unit_path.stem else "control-group")
    assert int(value_by_name["TimeoutStopSec"]) >= 60
    assert not any(SECRET_NAME_PATTERN.search(value) for name, value in named_values if name == "Environment")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("unit_path", UNIT_PATHS, ids=lambda unit_path: unit_path.name)
def test_systemd_accepts_a_unit_and_rates_its_exposure_as_low(unit_path: Path, tmp_path: Path) -> None:
    program_path = tmp_path / "program"
    program_path.write_text("#!/bin/sh\n")
    program_path.chmod(0o755)
    unit_copy_path = tmp_path / unit_path.name
    unit_copy_path.write_text(re.sub(r"/opt/nightjar/venv/bin/\w+", str(program_path), unit_path.read_text()))
    verification = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit_copy_path)], check=False, capture_output=True, text=True
    )
    assert [line for line in verification.stderr.splitlines() if unit_path.name in line] == []
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(unit_copy_path)]
    exposure_match = re.search(
        r"exposure level for \S+: ([\d.]+)", subprocess.run(command, capture_output=True, text=True).stdout
    )
    assert exposure_match is not None and float(exposure_match[1]) < 2.5  # of 10
