"""What tests make in a real cluster of the manifests of deploy/kubernetes: the workers' namespace, and what is in it."""

import shutil
import subprocess
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from ruamel.yaml import YAML

from addons.kubernetes.tests.control_plane import Kubelet
from gpuscale.common.runtime.tasks import TaskScope
from gpuscale_kubernetes.pods import REPLICA

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
WORKERS = "gpuscale-workers"


@cache
def _built(folder: Path) -> list[dict[str, Any]]:
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, timeout=60, check=True)
    return list(YAML(typ="safe").load_all(done.stdout))


def built(overlay: str, root: Path = DEPLOY / "kubernetes") -> list[dict[str, Any]]:
    """The objects of an overlay as kubectl applies them; skips the test where there is no kubectl."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    return deepcopy(_built(root / "overlays" / overlay))


def manifests() -> list[dict[str, Any]]:
    """Every object of deploy/kubernetes, as each overlay has it, namespaces first."""
    single = built("single")
    found = [*single, *(one for one in built("standby") if one not in single)]
    for path in ("workers.yaml", "monitoring/servicemonitor.yaml"):
        found += YAML(typ="safe").load_all((DEPLOY / "kubernetes" / path).read_text())
    return sorted(found, key=lambda one: one["kind"] != "Namespace")


def place(found: dict[str, Any]) -> str:
    """Where objects of its kind are made."""
    group, kind, meta = found["apiVersion"], found["kind"].lower(), found["metadata"]
    plural = f"{kind[:-1]}ies" if kind.endswith("y") else f"{kind}s"
    space = f"/namespaces/{meta['namespace']}" if "namespace" in meta else ""
    base = f"/api/{group}" if "/" not in group else f"/apis/{group}"
    return f"{base}{space}/{plural}"


async def applied(
    admin: httpx.AsyncClient, found: dict[str, Any], *, dry_run: bool = False
) -> httpx.Response:
    """The server's answer to a manifest: as `kubectl create` sends it, or `kubectl apply` where it is there already."""
    params = {"dryRun": "All"} if dry_run else {}
    answer = await admin.post(place(found), params=params, json=found)
    if answer.status_code != httpx.codes.CONFLICT:
        return answer
    return await admin.patch(
        f"{place(found)}/{found['metadata']['name']}",
        params={"fieldManager": "test", "force": "true", **params},
        headers={"Content-Type": "application/apply-patch+yaml"},
        json=found,
    )


async def made(admin: httpx.AsyncClient, found: dict[str, Any]) -> None:
    """Apply a manifest that must be taken."""
    answer = await applied(admin, found)
    assert answer.is_success, answer.text


@asynccontextmanager
async def site(admin: httpx.AsyncClient) -> AsyncGenerator[Kubelet]:
    """The namespace of the workers as deploy/kubernetes makes it, with one Deployment and nothing left of tests before."""
    objects = [
        one
        for one in manifests()
        if one["kind"] == "Namespace" or one["metadata"].get("namespace") == WORKERS
    ]
    for one in objects:
        if one["kind"] == "Deployment":
            await admin.delete(f"{deployments()}/worker", params={"propagationPolicy": "Background"})
        await made(admin, one)
    await made(admin, {**binding(), "metadata": {"name": "pods", "namespace": WORKERS}})
    await admin.delete(f"/apis/apps/v1/namespaces/{WORKERS}/replicasets")
    await admin.delete(f"/api/v1/namespaces/{WORKERS}/pods", params={"gracePeriodSeconds": "0"})
    kubelet = Kubelet(admin, WORKERS)
    async with TaskScope() as tasks:
        tasks.spawn("kubelet", kubelet.run())
        yield kubelet


def binding() -> dict[str, Any]:
    """The right to make pods, which is given only where it is needed."""
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "gpuscale-adapter-pods"},
        "subjects": [{"kind": "ServiceAccount", "name": "kubernetes-adapter", "namespace": "gpuscale"}],
    }


def deployments() -> str:
    """Where the Deployments of the workers are."""
    return f"/apis/apps/v1/namespaces/{WORKERS}/deployments"


async def pods_asked_for(admin: httpx.AsyncClient) -> int:
    """How many pods the Deployment is to have."""
    found = (await admin.get(f"{deployments()}/worker")).json()
    replicas = found["spec"]["replicas"]
    assert isinstance(replicas, int)
    return replicas


def by_replica(pods: dict[str, Any]) -> dict[str, str]:
    """Names of pods that are not being deleted, by their replica."""
    return {
        pod["metadata"].get("annotations", {}).get(REPLICA, ""): key
        for key, pod in pods.items()
        if "deletionTimestamp" not in pod["metadata"]
    }
