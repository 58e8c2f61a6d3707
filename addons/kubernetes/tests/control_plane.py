"""A real API server and controller manager on the loopback address, with etcd, where KUBEBUILDER_ASSETS has them.

There are no nodes: `Kubelet` plays one. It says of every pod that it runs, and ends those that are to be deleted.
"""

import asyncio
import json
import os
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any, Self

import httpx
import trustme

from addons.kubernetes.tests.fake_cluster import write_kubeconfig
from tests.support.guarded import GuardedFolder
from tests.support.ports import free_port
from tests.support.waiting import eventually_sync

PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager")
START_TIMEOUT_S = 150.0
ADMIN, ADAPTER, NOBODY = "admin-token", "adapter-token", "nobody-token"


def program(name: str) -> Path | None:
    """One of the programs: in the folder that KUBEBUILDER_ASSETS names, or etcd from the search path."""
    folder = os.environ.get("KUBEBUILDER_ASSETS")
    if folder and (Path(folder) / name).exists():
        return Path(folder) / name
    found = shutil.which(name) if name == "etcd" else None
    return Path(found) if found else None


def why_unavailable() -> str | None:
    """Why there can be no cluster here; None if there can."""
    if not os.environ.get("KUBEBUILDER_ASSETS"):
        return "KUBEBUILDER_ASSETS does not name a folder with kube-apiserver: see test_cluster.py"
    missing = [name for name in PROGRAMS if program(name) is None]
    return f"no {', '.join(missing)} in the folder of KUBEBUILDER_ASSETS" if missing else None


class ControlPlane:
    """etcd, the API server and the controller manager; use it as a context manager. All methods block."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"https://127.0.0.1:{self.port}"
        self._etcd = f"http://127.0.0.1:{free_port()}"
        self._folder = GuardedFolder("gpuscale-kubernetes-")
        self.path = self._folder.path
        self._authority = trustme.CA()
        self._server: Any = None

    def __enter__(self) -> Self:
        try:
            self._start()
        except (AssertionError, subprocess.SubprocessError) as error:
            tail = self._folder.tail()
            self._folder.close()
            raise RuntimeError(f"the control plane did not start: {error}\n{tail}") from error
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.close()

    def kubeconfig(self, token: str, namespace: str) -> Path:
        """A file that leads to it, as who bears that token."""
        path = self.path / f"kubeconfig-{token}-{namespace}"
        cluster = {"server": self.url, "certificate-authority": str(self.path / "ca.crt")}
        return write_kubeconfig(path, cluster, token, namespace)

    def client(self, token: str = ADMIN) -> httpx.AsyncClient:
        """An HTTP client that bears a token; the caller closes it."""
        trust = ssl.create_default_context(cafile=str(self.path / "ca.crt"))
        headers = {"Authorization": f"Bearer {token}"}
        return httpx.AsyncClient(
            base_url=self.url, verify=trust, headers=headers, timeout=60.0, trust_env=False
        )

    def _start(self) -> None:
        certificate = self._authority.issue_cert("127.0.0.1", "localhost")
        certificate.private_key_pem.write_to_path(self.path / "server.key")
        for position, pem in enumerate(certificate.cert_chain_pems):
            pem.write_to_path(self.path / "server.crt", append=position > 0)
        self._authority.cert_pem.write_to_path(self.path / "ca.crt")
        (self.path / "tokens.csv").write_text(
            f'{ADMIN},admin,1,"system:masters"\n'
            f"{ADAPTER},system:serviceaccount:gpuscale:kubernetes-adapter,2\n{NOBODY},nobody,3\n"
        )
        peers = f"http://127.0.0.1:{free_port()}"
        self._folder.spawn(
            "etcd",
            [
                str(program("etcd")),
                f"--data-dir={self.path / 'etcd'}",
                f"--listen-client-urls={self._etcd}",
                f"--advertise-client-urls={self._etcd}",
                f"--listen-peer-urls={peers}",
                f"--initial-advertise-peer-urls={peers}",
                f"--initial-cluster=default={peers}",
                "--unsafe-no-fsync",
            ],
            self._environment(),
        )
        self._server = self._folder.spawn("apiserver", self._api_command(), self._environment())
        eventually_sync(self._is_ready, timeout=START_TIMEOUT_S, interval=0.2)
        self._folder.spawn(
            "controllers",
            [
                str(program("kube-controller-manager")),
                f"--kubeconfig={self.kubeconfig(ADMIN, 'default')}",
                "--controllers=deployment,replicaset,namespace",
                "--leader-elect=false",
                "--bind-address=127.0.0.1",
                f"--secure-port={free_port()}",
                f"--cert-dir={self.path}",
            ],
            self._environment(),
        )

    def _api_command(self) -> list[str]:
        key = self.path / "server.key"
        return [
            str(program("kube-apiserver")),
            f"--etcd-servers={self._etcd}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={self.port}",
            f"--tls-cert-file={self.path / 'server.crt'}",
            f"--tls-private-key-file={key}",
            f"--token-auth-file={self.path / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--disable-admission-plugins=ServiceAccount",
            "--allow-privileged=true",
            f"--cert-dir={self.path}",
        ]

    def _environment(self) -> dict[str, str]:
        return {"PATH": os.environ["PATH"], "HOME": str(self.path), "GOMAXPROCS": "2"}

    def _is_ready(self) -> bool:
        if not self._server.running:
            raise subprocess.SubprocessError("the API server ended")
        trust = ssl.create_default_context(cafile=str(self.path / "ca.crt"))
        headers = {"Authorization": f"Bearer {ADMIN}"}
        try:
            answer = httpx.get(
                f"{self.url}/readyz", verify=trust, headers=headers, timeout=5, trust_env=False
            )
        except httpx.HTTPError:
            return False
        return answer.status_code == 200


class Kubelet:
    """One node's worth of life for the pods of a namespace: they run, are ready, and end when they are told to.

    Attributes:
        lingering: while set, pods that are to be deleted go on.
    """

    def __init__(self, client: httpx.AsyncClient, namespace: str) -> None:
        self._client = client
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        self.lingering = False

    async def pods(self) -> dict[str, Any]:
        """Every pod by name."""
        answer = (await self._client.get(self._pods)).raise_for_status().json()
        return {item["metadata"]["name"]: item for item in answer["items"]}

    async def run(self) -> None:
        """Go on for ever."""
        while True:
            for name, pod in (await self.pods()).items():
                await self._tend(name, pod)
            await asyncio.sleep(0.1)

    async def _tend(self, name: str, pod: dict[str, Any]) -> None:
        path = f"{self._pods}/{name}"
        if "deletionTimestamp" in pod["metadata"]:
            if not self.lingering:
                await self._client.delete(path, params={"gracePeriodSeconds": "0"})
        elif "nodeName" not in pod["spec"]:
            target = {"apiVersion": "v1", "kind": "Node", "name": "n1"}
            binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
            await self._client.post(f"{path}/binding", json=binding)
        elif pod["status"].get("phase") != "Running":
            await self._say(path, {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]})

    async def _say(self, path: str, status: dict[str, Any]) -> None:
        headers = {"Content-Type": "application/strategic-merge-patch+json"}
        await self._client.patch(f"{path}/status", content=json.dumps({"status": status}), headers=headers)
