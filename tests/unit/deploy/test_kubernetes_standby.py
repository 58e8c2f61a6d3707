"""overlays/standby is overlays/single with two allocators and two autoscalers on PostgreSQL, and nothing else."""

import tomllib
from typing import Any

import pytest

from addons.kubernetes.tests.site import built
from gpuscale.common.config.sources import load_table
from gpuscale.common.rpc.channel import split_addresses
from tests.unit.docs.pages import ROOT, programs

SETTINGS = tomllib.loads((ROOT / "deploy" / "kubernetes" / "base" / "gpuscale.toml").read_text())
SERVICES = ("allocator", "autoscaler")
DATABASE = "postgresql://gpuscale:secret@postgresql/gpuscale"


def found(kind: str, name: str, overlay: str = "standby") -> dict[str, Any]:
    [one] = [one for one in built(overlay) if one["kind"] == kind and one["metadata"]["name"] == name]
    return one


def stateful(service: str) -> dict[str, Any]:
    return found("StatefulSet", service)


def variables(workload: dict[str, Any]) -> dict[str, str]:
    """What its program sees, of the second pod where there are two."""
    [container] = workload["spec"]["template"]["spec"]["containers"]
    pod = f"{workload['metadata']['name']}-1"
    said = {one["name"]: one.get("value", "") for one in container["env"] if "value" in one}
    if any("$(POD)" in value for value in said.values()):  # which means what stands before it alone
        name = {"fieldRef": {"fieldPath": "metadata.name"}}
        assert container["env"][0] == {"name": "POD", "valueFrom": name}
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
    headless = found("Service", one["spec"]["serviceName"])
    assert headless["spec"]["clusterIP"] == "None"
    assert headless["spec"]["selector"] == one["spec"]["selector"]["matchLabels"]
    [port] = [one for one in headless["spec"]["ports"] if one["name"] == "grpc"]
    name = headless["metadata"]["name"]
    return tuple(f"{service}-{number}.{name}:{port['port']}" for number in range(one["spec"]["replicas"]))


def test_nothing_is_left_of_the_single_ones() -> None:
    names = ({(one["kind"], one["metadata"]["name"]) for one in built(of)} for of in ("single", "standby"))
    single, standby = names
    assert single - standby == {
        (kind, service) for kind in ("Deployment", "Service", "PersistentVolumeClaim") for service in SERVICES
    }


@pytest.mark.parametrize("service", SERVICES)
def test_a_pod_is_that_of_the_single_one_but_for_its_state(service: str) -> None:
    alone, twice = (
        one["spec"]["template"]["spec"] for one in (found("Deployment", service, "single"), stateful(service))
    )
    data = {"name": "data", "emptyDir": {"sizeLimit": "64Mi"}}
    assert data in twice["volumes"]
    assert "podAntiAffinity" in twice.pop("affinity")
    for one in (alone, twice):
        one["volumes"] = sorted(volume["name"] for volume in one["volumes"])
        env = one["containers"][0]["env"]
        one["containers"][0]["env"] = [each for each in env if each["name"] == "GPUSCALE_CONFIG"]
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
    callers = [one for one in built("standby") if one["kind"] in {"Deployment", "DaemonSet", "StatefulSet"}]
    named = set[str]()
    for one in callers:
        if one["metadata"]["name"] == "postgresql":
            continue
        read = settings(one)
        for service in SERVICES:
            if getattr(read, f"{service}_address", ""):  # the fleet may name none
                named.add(one["metadata"]["name"])
                assert split_addresses(getattr(read, f"{service}_address")) == addresses(service)
    assert named == {"agent", "autoscaler", "gateway", "kubernetes-adapter"}


def test_the_certificate_of_the_page_is_good_for_every_address() -> None:
    page = (ROOT / "docs" / "deploy.md").read_text()
    for service in SERVICES:
        for address in addresses(service):
            assert f"--host {address.partition(':')[0]}" in page


def test_keda_meets_pods_that_are_ready_by_one_name() -> None:
    service = found("Service", stateful("autoscaler")["spec"]["serviceName"])
    assert not service["spec"].get("publishNotReadyAddresses")
    [port] = [one for one in service["spec"]["ports"] if one["name"] == "grpc"]
    host = f"{service['metadata']['name']}.{service['metadata']['namespace']}"
    assert f"{host}:{port['port']}" in (ROOT / "deploy" / "keda" / "scaledobject.yaml").read_text()
    assert f"--host {host}" in (ROOT / "docs" / "deploy.md").read_text()
    policy = found("NetworkPolicy", "keda")["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= service["spec"]["selector"].items()
    assert policy["ingress"][0]["ports"] == [{"port": "grpc", "protocol": "TCP"}]


def test_the_database_keeps_its_data_and_its_password_to_itself() -> None:
    pod = found("StatefulSet", "postgresql")["spec"]["template"]["spec"]
    [container] = pod["containers"]
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    env = {one["name"]: one["value"] for one in container["env"]}
    assert env["PGDATA"].startswith(f"{mounts['data']}/")
    assert env["POSTGRES_PASSWORD_FILE"] == f"{mounts['password']}/password"
    assert "POSTGRES_PASSWORD" not in env
    assert env["POSTGRES_INITDB_ARGS"] == "--data-checksums"
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert set(container["resources"]["limits"]) == {"memory"}
