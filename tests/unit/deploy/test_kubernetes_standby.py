"""deploy/kubernetes-standby is deploy/kubernetes with two allocators and two autoscalers on PostgreSQL, and nothing else."""

import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from gpuscale.common.config.sources import load_table
from gpuscale.common.rpc.channel import split_addresses
from tests.unit.docs.pages import ROOT, programs

BASE, FOLDER = ROOT / "deploy" / "kubernetes", ROOT / "deploy" / "kubernetes-standby"
SETTINGS = tomllib.loads((BASE / "gpuscale.toml").read_text())
SERVICES = ("allocator", "autoscaler")
DATABASE = "postgresql://gpuscale:secret@postgresql/gpuscale"


def load(path: Path) -> list[dict[str, Any]]:
    return list(YAML(typ="safe").load_all(path.read_text()))


def found(path: Path, kind: str, name: str) -> dict[str, Any]:
    [one] = [one for one in load(path) if one["kind"] == kind and one["metadata"]["name"] == name]
    return one


def stateful(service: str) -> dict[str, Any]:
    return found(FOLDER / f"{service}s.yaml", "StatefulSet", service)


def kustomization() -> dict[str, Any]:
    [one] = load(FOLDER / "kustomization.yaml")
    return one


def patches() -> list[dict[str, Any]]:
    return [YAML(typ="safe").load(one["patch"]) for one in kustomization()["patches"]]


def variables(workload: dict[str, Any]) -> dict[str, str]:
    """What its program sees, of the second pod where there are two."""
    [container] = workload["spec"]["template"]["spec"]["containers"]
    pod = f"{workload['metadata']['name']}-1"
    said = {one["name"]: one.get("value", "") for one in container["env"] if "value" in one}
    if any(one.get("valueFrom", {}).get("secretKeyRef") for one in container["env"]):
        [database] = [one for one in container["env"] if "secretKeyRef" in one.get("valueFrom", {})]
        assert database["valueFrom"]["secretKeyRef"] == {"name": "gpuscale-database", "key": "url"}
        said[database["name"]] = DATABASE
    return {name: value.replace("$(POD)", pod) for name, value in said.items()}


def settings(workload: dict[str, Any]) -> Any:
    """The settings of its program; a variable that it does not know is refused."""
    [container] = workload["spec"]["template"]["spec"]["containers"]
    section = container.get("name").replace("-", "_")
    [kind] = [one for one in programs() if one.section == section]
    return load_table(kind, SETTINGS, environ=variables(workload))


def addresses(service: str) -> tuple[str, ...]:
    """Of the pods, as the cluster names them."""
    one = stateful(service)
    headless = found(FOLDER / f"{service}s.yaml", "Service", one["spec"]["serviceName"])
    assert headless["spec"]["clusterIP"] == "None"
    assert headless["spec"]["selector"] == one["spec"]["selector"]["matchLabels"]
    [port] = [one for one in headless["spec"]["ports"] if one["name"] == "grpc"]
    name = headless["metadata"]["name"]
    return tuple(f"{service}-{number}.{name}:{port['port']}" for number in range(one["spec"]["replicas"]))


def test_every_manifest_is_applied_beside_all_of_the_others() -> None:
    there = {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml"}
    assert set(kustomization()["resources"]) == there | {"../kubernetes"}
    assert kustomization()["images"] == load(BASE / "kustomization.yaml")[0]["images"]


@pytest.mark.parametrize("service", SERVICES)
def test_a_pod_is_that_of_the_single_one_but_for_its_state(service: str) -> None:
    """Whatever is changed there is to be changed here."""
    [alone, twice] = [
        one["spec"]["template"]
        for one in (found(BASE / f"{service}.yaml", "Deployment", service), stateful(service))
    ]
    volumes = [one for one in alone["spec"]["volumes"] if one["name"] != "data"]
    assert [one for one in twice["spec"]["volumes"] if one["name"] != "data"] == volumes
    assert "podAntiAffinity" in twice["spec"].pop("affinity")
    for one in (alone, twice):
        del one["spec"]["volumes"]
        env = one["spec"]["containers"][0]["env"]
        one["spec"]["containers"][0]["env"] = [e for e in env if e["name"] == "GPUSCALE_CONFIG"]
    assert twice == alone


@pytest.mark.parametrize("service", SERVICES)
def test_each_of_two_says_an_address_that_callers_know(service: str) -> None:
    one = stateful(service)
    assert one["spec"]["replicas"] == 2
    read = settings(one)
    assert read.advertise_address == addresses(service)[1]
    assert read.database.reveal() == DATABASE
    assert read.listen.rpartition(":")[2] == addresses(service)[1].rpartition(":")[2]


def test_whoever_calls_them_names_both() -> None:
    callers = [stateful("autoscaler"), *(one for one in patches() if one["kind"] == "Deployment")]
    assert {one["metadata"]["name"] for one in callers} == {"autoscaler", "gateway", "kubernetes-adapter"}
    for one in callers:
        read = settings(one)
        for field in ("allocator_address", "autoscaler_address"):
            if hasattr(read, field):
                assert split_addresses(getattr(read, field)) == addresses(field.partition("_")[0])


def test_the_certificate_of_the_page_is_good_for_every_address() -> None:
    page = (ROOT / "docs" / "deploy.md").read_text()
    for service in SERVICES:
        for address in addresses(service):
            assert f"--host {address.partition(':')[0]}" in page


def test_the_database_keeps_its_data_and_its_password_to_itself() -> None:
    server = found(FOLDER / "postgresql.yaml", "StatefulSet", "postgresql")
    pod = server["spec"]["template"]["spec"]
    [container] = pod["containers"]
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    env = {one["name"]: one["value"] for one in container["env"]}
    assert env["PGDATA"].startswith(f"{mounts['data']}/")
    assert env["POSTGRES_PASSWORD_FILE"] == f"{mounts['password']}/password"
    assert "POSTGRES_PASSWORD" not in env
    assert env["POSTGRES_INITDB_ARGS"] == "--data-checksums"
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    policy = found(FOLDER / "postgresql.yaml", "NetworkPolicy", "postgresql")
    [rule] = policy["spec"]["ingress"]
    assert [one["podSelector"]["matchLabels"]["app.kubernetes.io/name"] for one in rule["from"]] == list(
        SERVICES
    )
    [inside] = [one for one in patches() if one["kind"] == "NetworkPolicy"]
    assert inside["spec"]["podSelector"]["matchExpressions"][0]["values"] == ["postgresql"]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl here to build it with")
def test_kubectl_builds_it_without_the_single_ones() -> None:
    built = subprocess.run(
        ["kubectl", "kustomize", str(FOLDER)], capture_output=True, text=True, timeout=60, check=True
    )
    objects = {(one["kind"], one["metadata"]["name"]): one for one in YAML(typ="safe").load_all(built.stdout)}
    for service in SERVICES:
        assert objects.keys().isdisjoint(
            (kind, service) for kind in ("Deployment", "Service", "PersistentVolumeClaim")
        )
        [container] = objects["StatefulSet", service]["spec"]["template"]["spec"]["containers"]
        assert container["image"] == "gpuscale:0.1.0"
    gateway = objects["Deployment", "gateway"]
    assert settings(gateway).allocator_address == ",".join(addresses("allocator"))
    assert "GPUSCALE_CONFIG" in variables(gateway)
    assert gateway["spec"]["replicas"] == 2
