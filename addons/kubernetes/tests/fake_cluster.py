"""As much of the API of Kubernetes as the adapter uses, in memory, with a Deployment controller and a kubelet of sorts."""

import asyncio
import copy
import json
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from aiohttp import web

Object = dict[str, Any]
NAMESPACE = "work"
ADAPTER = "k1"
COST = "controller.kubernetes.io/pod-deletion-cost"


def deployment(name: str = "worker", replicas: int = 0, **labels: str) -> Object:
    """A Deployment that belongs to the adapter."""
    return {
        "metadata": {"name": name, "uid": f"uid-of-{name}"},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"app": name}},
            "template": {
                "metadata": {"labels": labels or {"app": name, "gpuscale.adapter": ADAPTER}},
                "spec": {
                    "terminationGracePeriodSeconds": 20,
                    "containers": [
                        {
                            "name": "worker",
                            "image": "worker",
                            "resources": {"limits": {"nvidia.com/gpu": "1"}},
                        }
                    ],
                },
            },
        },
        "status": {},
    }


class FakeKubernetes:
    """One namespace.

    Attributes:
        deployments, pods: what there is, by name.
        calls: method and path of every request, and how often it came.
        bodies: what was sent, in order.
        fail: may answer a request itself: a status, and why.
        frozen: while set, no controller does anything.
        instant: while set, pods that have no node are gone at once when they are to be deleted.
        before_scale: called once, right before a change of the scale is looked at.
    """

    def __init__(self) -> None:
        self.deployments: dict[str, Object] = {}
        self.pods: dict[str, Object] = {}
        self.calls: Counter[str] = Counter()
        self.bodies: list[tuple[str, Object]] = []
        self.fail: Callable[[str, str], tuple[int, str] | None] = lambda method, path: None
        self.frozen = False
        self.instant = False
        self.before_scale: Callable[[], None] | None = None
        self.url = ""
        self._version = 0
        self._made = 0
        self._changed = asyncio.Event()

    def add(self, found: Object) -> None:
        """Make a Deployment."""
        self.deployments[found["metadata"]["name"]] = self._touched(found)
        self.control()

    def rescale(self, name: str, replicas: int) -> None:
        """What somebody else does with kubectl."""
        self.deployments[name]["spec"]["replicas"] = replicas
        self._touched(self.deployments[name])
        self.control()

    def replica(self, pod: str) -> str:
        """The replica that a pod is marked as."""
        return str(self.pods[pod]["metadata"].get("annotations", {}).get("gpuscale.replica", ""))

    def pod_of(self, replica: str) -> str:
        """The pod of a replica that is not being deleted."""
        (name,) = [n for n, pod in self.pods.items() if self.replica(n) == replica and not _going(pod)]
        return name

    def run(self, pod: str, *, ready: bool = True) -> None:
        """What the kubelet says of a pod."""
        self.pods[pod]["status"] = {
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        }
        self._touched(self.pods[pod])

    def status(self, pod: str, status: Object) -> None:
        """A pod stands like this."""
        self.pods[pod]["status"] = status
        self._touched(self.pods[pod])

    def end(self, pod: str) -> None:
        """The kubelet has ended a pod that was to be deleted."""
        del self.pods[pod]
        self._touch()
        self.control()

    def stir(self) -> None:
        """Something happened that is none of the adapter's business: whoever watches looks again."""
        self._touch()

    def going(self) -> list[str]:
        """Pods that are being deleted."""
        return [name for name, pod in self.pods.items() if _going(pod)]

    def control(self) -> None:
        """What the controller does: pods are made and ended until there are as many as asked for."""
        if self.frozen:
            return
        for name, found in self.deployments.items():
            mine = [pod for pod in self.pods.values() if _owner(pod) == f"{name}-abc"]
            active = [pod for pod in mine if not _going(pod) and not _over(pod)]
            for _ in range(found["spec"]["replicas"] - len(active)):
                self._make(name, found)
            surplus = len(active) - found["spec"]["replicas"]
            for pod in sorted(active, key=_rank)[: max(0, surplus)]:
                if self.instant and pod["status"]["phase"] == "Pending":
                    self.end(pod["metadata"]["name"])
                    continue
                pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
                self._touched(pod)

    def _make(self, name: str, found: Object) -> None:
        template = copy.deepcopy(found["spec"]["template"])
        owner = {
            "apiVersion": "apps/v1",
            "kind": "ReplicaSet",
            "name": f"{name}-abc",
            "uid": "r",
            "controller": True,
        }
        self._keep(f"{name}-abc-{self._made}", template, [owner], {"pod-template-hash": "abc"})

    def _keep(self, name: str, pod: Object, owners: list[Object], labels: Object) -> Object:
        self._made += 1
        meta = pod["metadata"]
        meta["labels"] = {**meta.get("labels", {}), **labels}
        meta |= {
            "name": name,
            "uid": f"uid-{self._made}",
            "ownerReferences": owners,
            "creationTimestamp": f"2026-01-01T00:{self._made // 60:02}:{self._made % 60:02}Z",
        }
        pod["status"] = {"phase": "Pending"}
        self.pods[name] = pod
        return self._touched(pod)

    def _touch(self) -> str:
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()
        return str(self._version)

    def _touched(self, found: Object) -> Object:
        found["metadata"]["resourceVersion"] = self._touch()
        return found

    def app(self) -> web.Application:
        """The server."""
        pods, apps = (
            f"/api/v1/namespaces/{NAMESPACE}/pods",
            f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments",
        )
        app = web.Application(middlewares=[self._note])
        app.add_routes(
            [
                web.get(pods, self._list),
                web.post(pods, self._create),
                web.patch(pods + "/{name}", self._patch),
                web.delete(pods + "/{name}", self._delete),
                web.get(apps + "/{name}", self._get),
                web.patch(apps + "/{name}/scale", self._scale),
                web.post("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", self._review),
            ]
        )
        return app

    @web.middleware
    async def _note(self, request: web.Request, handler: Any) -> web.StreamResponse:
        what = "watch" if "watch" in request.query else request.method
        path = request.path.removeprefix("/api/v1").removeprefix("/apis/apps/v1")
        path = path.removeprefix(f"/namespaces/{NAMESPACE}")
        self.calls[f"{what} {path}"] += 1
        if failure := self.fail(what, path):
            return _status(failure[0], "Forbidden" if failure[0] == 403 else "Failure", failure[1])
        response: web.StreamResponse = await handler(request)
        return response

    async def _list(self, request: web.Request) -> web.StreamResponse:
        key, _, value = request.query["labelSelector"].partition("=")
        if "watch" not in request.query:
            found = [pod for pod in self.pods.values() if pod["metadata"].get("labels", {}).get(key) == value]
            return web.json_response({"metadata": {"resourceVersion": str(self._version)}, "items": found})
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        changed = self._changed
        if str(self._version) == request.query["resourceVersion"]:
            try:
                await asyncio.wait_for(changed.wait(), float(request.query["timeoutSeconds"]))
            except TimeoutError:
                return response
        event = {"type": "MODIFIED", "object": {"metadata": {"resourceVersion": str(self._version)}}}
        with suppress(ConnectionResetError):  # whoever watched went away meanwhile
            await response.write(json.dumps(event).encode() + b"\n")
        return response

    async def _create(self, request: web.Request) -> web.Response:
        pod = await request.json()
        self.bodies.append(("create", pod))
        name = pod["metadata"]["name"]
        if name in self.pods:
            return _status(409, "AlreadyExists", f'pods "{name}" already exists')
        if "dryRun" in request.query:
            return web.json_response(pod)
        return web.json_response(self._keep(name, pod, [], {}), status=201)

    async def _patch(self, request: web.Request) -> web.Response:
        pod = self.pods.get(request.match_info["name"])
        body = await request.json()
        self.bodies.append(("patch", body))
        if pod is None:
            return _status(404, "NotFound", "no such pod")
        if body["metadata"].get("uid", pod["metadata"]["uid"]) != pod["metadata"]["uid"]:
            return _status(409, "Conflict", "the UID in the precondition does not match")
        for part in ("labels", "annotations"):
            marks = {**pod["metadata"].get(part, {}), **body["metadata"].get(part, {})}
            pod["metadata"][part] = {name: value for name, value in marks.items() if value is not None}
        return web.json_response(self._touched(pod))

    async def _delete(self, request: web.Request) -> web.Response:
        pod = self.pods.get(request.match_info["name"])
        if pod is None:
            return _status(404, "NotFound", "no such pod")
        pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        pod["metadata"]["deletionGracePeriodSeconds"] = int(request.query.get("gracePeriodSeconds", "30"))
        return web.json_response(self._touched(pod))

    async def _get(self, request: web.Request) -> web.Response:
        found = self.deployments.get(request.match_info["name"])
        return web.json_response(found) if found else _status(404, "NotFound", "no such Deployment")

    async def _scale(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(("scale", body))
        if self.before_scale is not None:
            self.before_scale()
            self.before_scale = None
        found = self.deployments.get(request.match_info["name"])
        if found is None:
            return _status(404, "NotFound", "no such Deployment")
        if body["metadata"]["resourceVersion"] != found["metadata"]["resourceVersion"]:
            return _status(409, "Conflict", "the object has been modified")
        if "dryRun" not in request.query:
            found["spec"]["replicas"] = body["spec"]["replicas"]
            self._touched(found)
            self.control()
        return web.json_response(
            {"metadata": found["metadata"], "spec": body["spec"], "status": {"replicas": 0}}
        )

    async def _review(self, request: web.Request) -> web.Response:
        body = await request.json()
        asked = body["spec"]["resourceAttributes"]
        denied = self.fail(asked["verb"], f"/{asked['resource']}") is not None
        return web.json_response({**body, "status": {"allowed": not denied}}, status=201)

    def kubeconfig(self, folder: Path) -> Path:
        """A file that leads to it."""
        return write_kubeconfig(folder / "kubeconfig", {"server": self.url}, "secret", NAMESPACE)


def write_kubeconfig(path: Path, cluster: Object, token: str, namespace: str) -> Path:
    """A file that leads to a cluster, as who bears that token."""
    context = {"cluster": "c", "user": "c", "namespace": namespace}
    found = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": context}],
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "c", "user": {"token": token}}],
    }
    path.write_text(json.dumps(found))
    return path


@asynccontextmanager
async def serving() -> AsyncGenerator[FakeKubernetes]:
    """A cluster until the block ends."""
    fake = FakeKubernetes()
    runner = web.AppRunner(fake.app(), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    try:
        await site.start()
        host, port = runner.addresses[0][:2]
        fake.url = f"http://{host}:{port}"
        yield fake
    finally:
        await runner.cleanup()


def _status(code: int, reason: str, message: str) -> web.Response:
    body = {"kind": "Status", "apiVersion": "v1", "code": code, "reason": reason, "message": message}
    return web.Response(body=json.dumps(body).encode(), status=code, content_type="application/json")


def _owner(pod: Object) -> str:
    owners = pod["metadata"].get("ownerReferences") or [{}]
    return str(owners[0].get("name", ""))


def _going(pod: Object) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def _over(pod: Object) -> bool:
    return pod["status"]["phase"] in {"Failed", "Succeeded"}


def _rank(pod: Object) -> tuple[bool, bool, int, str]:
    """The order in which a ReplicaSet ends pods."""
    conditions = pod["status"].get("conditions", [])
    ready = any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
    cost = int(pod["metadata"].get("annotations", {}).get(COST, "0"))
    return pod["status"]["phase"] == "Running", ready, cost, pod["metadata"]["creationTimestamp"]
