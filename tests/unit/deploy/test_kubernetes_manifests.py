"""The manifests of deploy/kubernetes fit each other, the programs and their settings, and ask for no more than they need."""

import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from addons.kubernetes.tests.site import built
from gpuscale.common.config.sources import load_table
from gpuscale_kubernetes.engine import KubernetesSettings
from gpuscale_kubernetes.pods import ADAPTER
from tests.unit.docs.pages import ROOT, programs, scripts

FOLDER = ROOT / "deploy" / "kubernetes"
SETTINGS = tomllib.loads((FOLDER / "base" / "gpuscale.toml").read_text())
PROGRAMS = ("agent", "allocator", "autoscaler", "dashboard", "fleet", "gateway", "kubernetes-adapter")


def load(path: Path) -> list[dict[str, Any]]:
    return list(YAML(typ="safe").load_all(path.read_text()))


def objects(*kinds: str) -> list[dict[str, Any]]:
    return [one for one in built("single") if not kinds or one["kind"] in kinds]


def workloads() -> list[dict[str, Any]]:
    return objects("Deployment", "DaemonSet")


@pytest.fixture(params=PROGRAMS)
def one(request: pytest.FixtureRequest) -> dict[str, Any]:
    [found] = [each for each in workloads() if name(each) == request.param]
    return found


def name(one: dict[str, Any]) -> str:
    text = one["metadata"]["name"]
    assert isinstance(text, str)
    return text


def pod(one: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = one["spec"]["template"]["spec"]
    return found


def test_every_program_of_the_tests_below_is_there() -> None:
    assert {name(one) for one in workloads()} == set(PROGRAMS)


@pytest.mark.parametrize("folder", ["base", "overlays/standby", "monitoring"])
def test_every_manifest_is_used(folder: str) -> None:
    [found] = load(FOLDER / folder / "kustomization.yaml")
    there = {path.name for path in (FOLDER / folder).glob("*.yaml")} - {"kustomization.yaml"}
    used = {*found["resources"], *(patch.get("path") for patch in found.get("patches", ()))}
    assert {str(one) for one in used - {None} if not str(one).startswith("..")} == there


def test_every_object_names_its_namespace_and_no_secret_is_in_the_files() -> None:
    found = objects()
    assert objects("Secret") == []
    assert all("namespace" in one["metadata"] for one in found if one["kind"] != "Namespace")


def test_each_runs_a_program_with_settings_that_it_takes(one: dict[str, Any]) -> None:
    (container,) = pod(one)["containers"]
    (program,) = container["command"]
    assert program in scripts()
    section = program.removeprefix("gpuscale-").replace("-", "_")
    [settings] = [kind for kind in programs() if kind.section == section]
    load_table(settings, SETTINGS)
    known = {f"GPUSCALE_{section.upper()}_{field.upper()}" for field in settings.model_fields} | {
        "GPUSCALE_CONFIG"
    }
    assert {env["name"] for env in container["env"] if env["name"].startswith("GPUSCALE_")} <= known
    ports = {port["containerPort"] for port in container.get("ports", ())}
    table = SETTINGS[section]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["grpc"]["port"] == int(table["health_listen"].rpartition(":")[2])
    listens = {int(table[key].rpartition(":")[2]) for key in ("listen", "metrics_listen") if key in table}
    assert ports == listens


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


def test_none_runs_as_root_writes_to_its_image_or_may_ask_the_cluster(one: dict[str, Any]) -> None:
    (container,) = pod(one)["containers"]
    assert pod(one)["securityContext"]["runAsNonRoot"] is True
    least = {"readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    assert container["securityContext"] == {"allowPrivilegeEscalation": False} | least
    may_ask = pod(one).get("automountServiceAccountToken", True)
    assert may_ask == (name(one) == "kubernetes-adapter")


def test_prometheus_asks_as_the_programs_want_to_be_asked() -> None:
    """They serve metrics over TLS, to whoever shows a token, where gRPC is served so."""
    served = [table for table in SETTINGS.values() if "metrics_listen" in table]
    assert all({"tls_cert_file", "tokens_file"} <= table.keys() for table in served)
    [monitor] = load(FOLDER / "monitoring" / "servicemonitor.yaml")
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
        target = service["spec"]["selector"]["app.kubernetes.io/name"]
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
    rules = roles["gpuscale-adapter"]
    allowed = {(of, verb) for rule in rules for of in rule["resources"] for verb in rule["verbs"]}
    pods = {("pods", verb) for verb in ("get", "list", "watch", "patch")}
    assert allowed == {("deployments", "get"), ("deployments/scale", "patch")} | pods
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
    [container] = found["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["--queue", template.parameters["queue"]]


def selected(policy: dict[str, Any], pod: dict[str, str]) -> bool:
    return matches(policy["spec"]["podSelector"], pod)


def matches(selector: dict[str, Any], pod: dict[str, str]) -> bool:
    assert selector.keys() <= {"matchLabels", "matchExpressions"}
    return all(pod.get(key) == value for key, value in selector.get("matchLabels", {}).items()) and all(
        (one["operator"] == "In") and pod.get(one["key"]) in one["values"]
        for one in selector.get("matchExpressions", ())
    )


def ways(overlay: str, direction: str) -> dict[tuple[str, str], set[int | str]]:
    """Which pods may reach which others, and at which ports; "*" is whoever or whatever. Policies of a pod add up."""
    key, peer = ("Egress", "to") if direction == "egress" else ("Ingress", "from")
    labels = {
        name(one): one["spec"]["template"]["metadata"]["labels"]
        for one in built(overlay)
        if one["kind"] in {"Deployment", "DaemonSet", "StatefulSet"}
    }
    found: dict[tuple[str, str], set[int | str]] = {}
    policies = [one for one in built(overlay) if one["kind"] == "NetworkPolicy"]
    for pod, own in labels.items():
        of_pod = [one for one in policies if selected(one, own) and key in one["spec"]["policyTypes"]]
        assert of_pod, f"nothing bounds the {direction} of {pod}"
        for rule in (rule for one in of_pod for rule in one["spec"].get(direction, ())):
            others = {"*"}
            if peer in rule:
                spaces = {
                    str(each["namespaceSelector"]) for each in rule[peer] if "namespaceSelector" in each
                }
                inside = [each["podSelector"] for each in rule[peer] if "podSelector" in each]
                others = spaces | {
                    to for to, theirs in labels.items() for each in inside if matches(each, theirs)
                }
            ports = {each["port"] for each in rule.get("ports", [{"port": "*"}])}
            for other in others:
                found.setdefault((pod, other), set()).update(ports)
    return found


@pytest.mark.parametrize("overlay", ["single", "standby"])
def test_policies_let_out_and_in_what_has_to_and_nothing_else(overlay: str) -> None:
    out, into = ways(overlay, "egress"), ways(overlay, "ingress")
    dns = str({"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}})
    assert {pod for (pod, to), ports in out.items() if to == dns and ports == {53}} == set(PROGRAMS)
    elsewhere = {pod: ports for (pod, to), ports in out.items() if to == "*"}
    brokers: set[int | str] = {5671, 5672, 15671, 15672, 9090}
    database: set[int | str] = {5432} if overlay == "standby" else set()
    assert elsewhere.pop("allocator", set()) == database
    assert elsewhere == {"autoscaler": brokers | database, "kubernetes-adapter": {443, 6443}}
    for one in PROGRAMS:
        assert all("*" in out[one, to] and "*" in into[to, one] for to in PROGRAMS)
    of_all = {pod: ports for (pod, to), ports in into.items() if to == "*"}
    assert of_all == {"gateway": {"grpc"}, "dashboard": {"https"}}
    if overlay == "standby":
        assert {to for pod, to in into if pod == "postgresql"} == {"allocator", "autoscaler"}
        assert not any(pod == "postgresql" for pod, _ in out)


def test_a_digest_takes_the_place_of_the_tag(tmp_path: Path) -> None:
    """As docs/deploy.md has it: in the one file that names images, for every pod of both overlays."""
    copy = shutil.copytree(FOLDER, tmp_path / "kubernetes")
    images = copy / "images" / "kustomization.yaml"
    digest = f"sha256:{'0123456789abcdef' * 4}"
    images.write_text(re.sub(r'newTag: ".*"', f"digest: {digest}", images.read_text()))
    for overlay in ("single", "standby"):
        found = built(overlay, copy)
        used = {
            container["image"]
            for one in found
            if one["kind"] in {"Deployment", "DaemonSet", "StatefulSet"}
            for container in (*pod(one)["containers"], *pod(one).get("initContainers", ()))
        }
        names = {"gpuscale"} | ({"postgres"} if overlay == "standby" else set())
        assert used == {f"{each}@{digest}" for each in names}
