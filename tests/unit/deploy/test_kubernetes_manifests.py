"""The manifests of deploy/kubernetes fit each other, the programs and their settings, and ask for no more than they need."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from gpuscale.autoscaler.adapters.engines.kubernetes.engine import KubernetesSettings
from gpuscale.autoscaler.adapters.engines.kubernetes.pods import ADAPTER
from gpuscale.common.config.sources import load_table
from tests.unit.docs.pages import ROOT, programs

FOLDER = ROOT / "deploy" / "kubernetes"
FILES = sorted(path for path in FOLDER.rglob("*.yaml") if path.name != "kustomization.yaml")
SETTINGS = tomllib.loads((FOLDER / "gpuscale.toml").read_text())


def load(path: Path) -> list[dict[str, Any]]:
    return list(YAML(typ="safe").load_all(path.read_text()))


def objects(*kinds: str) -> list[dict[str, Any]]:
    return [one for path in FILES for one in load(path) if not kinds or one["kind"] in kinds]


def workloads() -> list[dict[str, Any]]:
    """What runs a program of gpuscale."""
    found = objects("Deployment", "DaemonSet")
    return [one for one in found if one["metadata"]["namespace"] == "gpuscale"]


def name(one: dict[str, Any]) -> str:
    text = one["metadata"]["name"]
    assert isinstance(text, str)
    return text


def pod(one: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = one["spec"]["template"]["spec"]
    return found


@pytest.mark.parametrize("folder", [FOLDER, FOLDER / "monitoring"], ids=lambda one: one.name)
def test_every_manifest_is_applied_but_the_example(folder: Path) -> None:
    [found] = load(folder / "kustomization.yaml")
    there = {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml", "workers.yaml"}
    assert set(found["resources"]) == there


def test_every_object_names_its_namespace_and_no_secret_is_in_the_files() -> None:
    found = objects()
    assert objects("Secret") == []
    assert all("namespace" in one["metadata"] for one in found if one["kind"] != "Namespace")


@pytest.mark.parametrize("one", workloads(), ids=name)
def test_each_runs_a_program_with_settings_that_it_takes(one: dict[str, Any]) -> None:
    (container,) = pod(one)["containers"]
    (program,) = container["command"]
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert program in scripts
    section = program.removeprefix("gpuscale-").replace("-", "_")
    [settings] = [kind for kind in programs() if kind.section == section]
    load_table(settings, SETTINGS)
    known = {f"GPUSCALE_{section.upper()}_{field.upper()}" for field in settings.model_fields} | {
        "GPUSCALE_CONFIG"
    }
    assert {env["name"] for env in container["env"] if env["name"].startswith("GPUSCALE_")} <= known
    ports = {port["containerPort"] for port in container.get("ports", ())}
    table = SETTINGS[section]
    listens = {int(table[key].rpartition(":")[2]) for key in ("listen", "metrics_listen") if key in table}
    assert ports == listens


@pytest.mark.parametrize("one", workloads(), ids=name)
def test_every_file_that_its_settings_name_is_mounted(one: dict[str, Any]) -> None:
    (container,) = pod(one)["containers"]
    section = container["command"][0].removeprefix("gpuscale-").replace("-", "_")
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    for key, value in SETTINGS[section].items():
        if key.endswith(("_file", "_dir")) and value != "-":
            assert any(str(value).startswith(mount) for mount in mounts), (key, value)
    volumes = {volume["name"]: volume for volume in pod(one)["volumes"]}
    assert set(volumes) == {mount["name"] for mount in container["volumeMounts"]}
    assert all(volume["secret"]["defaultMode"] == 0o440 for volume in volumes.values() if "secret" in volume)
    callers = volumes.get("callers", {}).get("secret", {}).get("items", [])
    token = SETTINGS[section].get("token_file", "")
    assert [item["path"] for item in callers] == ([Path(token).name] if token else [])


@pytest.mark.parametrize("one", workloads(), ids=name)
def test_none_runs_as_root_writes_to_its_image_or_may_ask_the_cluster(one: dict[str, Any]) -> None:
    (container,) = pod(one)["containers"]
    assert pod(one)["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    may_ask = pod(one).get("automountServiceAccountToken", True)
    assert may_ask == (name(one) == "kubernetes-adapter")


def test_prometheus_asks_as_the_programs_want_to_be_asked() -> None:
    """They serve metrics over TLS, to whoever shows a token, where gRPC is served so."""
    served = [table for table in SETTINGS.values() if "metrics_listen" in table]
    assert all({"tls_cert_file", "tokens_file"} <= table.keys() for table in served)
    [monitor] = objects("ServiceMonitor")
    [asked] = monitor["spec"]["endpoints"]
    assert asked["scheme"] == "https"
    assert asked["tlsConfig"]["ca"]["secret"] == {"name": "gpuscale-tls", "key": "ca.crt"}
    assert {"targetLabel": "job", "replacement": "gpuscale-$1"}.items() <= asked["relabelings"][0].items()
    assert 'up{job=~"gpuscale.*"} == 0' in (ROOT / "deploy" / "prometheus" / "rules.yml").read_text()
    token = asked["authorization"]["credentials"]
    commands = (ROOT / "docs" / "deploy.md").read_text()
    assert f"generic {token['name']} " in commands
    assert f"--from-file={token['key']}" in commands
    assert f"--host {asked['tlsConfig']['serverName']} " in commands


@pytest.mark.parametrize("one", workloads(), ids=name)
def test_one_that_takes_too_much_memory_ends_alone(one: dict[str, Any]) -> None:
    """CPU has no limit: one would make leases late on a node that is idle."""
    (container,) = pod(one)["containers"]
    assert set(container["resources"]["requests"]) == {"cpu", "memory"}
    assert set(container["resources"]["limits"]) == {"memory"}


def test_services_and_policies_select_what_is_there() -> None:
    ports = {
        name(one): {p["name"] for p in pod(one)["containers"][0].get("ports", ())} for one in workloads()
    }
    for service in objects("Service"):
        (target,) = service["spec"]["selector"].values()
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports[target]
        served = {port["port"] for port in service["spec"]["ports"]}
        assert served == {p["containerPort"] for p in _container(target)["ports"]}
    claims = {name(one) for one in objects("PersistentVolumeClaim")}
    used = {
        volume["persistentVolumeClaim"]["claimName"]
        for one in workloads()
        for volume in pod(one)["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert claims == used


def _container(target: str) -> dict[str, Any]:
    [one] = [one for one in workloads() if name(one) == target]
    found: dict[str, Any] = pod(one)["containers"][0]
    return found


def test_one_that_keeps_state_is_never_there_twice() -> None:
    for one in workloads():
        if any("persistentVolumeClaim" in volume for volume in pod(one)["volumes"]):
            assert one["spec"]["replicas"] == 1
            assert one["spec"]["strategy"] == {"type": "Recreate"}


def test_the_agent_sees_all_gpus_and_holds_none() -> None:
    (agent,) = objects("DaemonSet")
    (container,) = pod(agent)["containers"]
    env = {one["name"]: one.get("value") for one in container["env"]}
    assert env["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert env["NVIDIA_DRIVER_CAPABILITIES"] == "utility"
    assert "CUDA_VISIBLE_DEVICES" not in env
    assert pod(agent)["runtimeClassName"] == "nvidia"
    assert pod(agent)["hostPID"] is True
    assert set(container["resources"]["limits"]) == {"memory"}


def test_the_fences_that_an_agent_knows_outlive_its_pod() -> None:
    """They are on the node. What the kubelet makes there is root's, and is given to the agent's user before it starts."""
    (agent,) = objects("DaemonSet")
    [first], [container] = pod(agent)["initContainers"], pod(agent)["containers"]
    [mounted] = first["volumeMounts"]
    assert mounted in container["volumeMounts"]
    assert Path(SETTINGS["agent"]["state_dir"]).is_relative_to(mounted["mountPath"])
    [volume] = [one for one in pod(agent)["volumes"] if one["name"] == mounted["name"]]
    assert volume["hostPath"]["type"] == "DirectoryOrCreate"
    user = pod(agent)["securityContext"]
    assert first["command"] == ["chown", f"{user['runAsUser']}:{user['runAsGroup']}", mounted["mountPath"]]
    assert first["securityContext"] == {
        "runAsNonRoot": False,
        "runAsUser": 0,
        "runAsGroup": 0,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"], "add": ["CHOWN"]},
    }
    assert set(first["resources"]["limits"]) == {"memory"}
    assert not any(
        "initContainers" in pod(one) or any("hostPath" in volume for volume in pod(one)["volumes"])
        for one in workloads()
        if one["kind"] != "DaemonSet"
    )


def test_the_adapter_may_do_what_it_does_and_nothing_else() -> None:
    """The integration tests run with these very rights; more than these would go unnoticed there."""
    roles = {name(one): one["rules"] for one in objects("Role", "ClusterRole")}
    allowed = {
        (resource, verb)
        for rule in roles["gpuscale-adapter"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert allowed == {
        *((f"{kind}s", "get") for kind in ("deployment", "statefulset")),
        *((f"{kind}s/scale", "patch") for kind in ("deployment", "statefulset")),
        *(("pods", verb) for verb in ("get", "list", "watch", "patch")),
    }
    assert roles["gpuscale-adapter-pods"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["create", "delete"]}
    ]
    assert {one["metadata"]["namespace"] for one in objects("Role", "RoleBinding")} == {"gpuscale-workers"}
    assert objects("ClusterRole", "ClusterRoleBinding") == []
    [bound] = objects("RoleBinding")
    assert bound["roleRef"]["name"] == "gpuscale-adapter"


def test_the_example_is_a_deployment_that_the_adapter_scales() -> None:
    settings = load_table(KubernetesSettings, SETTINGS)
    [found] = load(FOLDER / "workers.yaml")
    template = settings.kubernetes_templates["worker"]
    assert name(found) == template.workload
    assert found["metadata"]["namespace"] == settings.namespace
    assert found["spec"]["template"]["metadata"]["labels"][ADAPTER] == settings.adapter
    assert found["spec"]["template"]["spec"]["containers"][0]["args"] == [
        "--queue",
        template.parameters["queue"],
    ]
