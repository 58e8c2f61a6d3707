"""A container engine in memory that speaks Docker's API over a unix socket, and misbehaves as it is told to."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web


@dataclass
class Container:
    id: str
    name: str
    config: dict[str, object]
    state: str = "created"
    exit_code: int = 0
    health: str = ""
    signals: list[str] = field(default_factory=list)


@dataclass
class DockerDouble:
    """The engine.

    Attributes:
        containers: by id.
        images: what it has.
        registry: what it can pull.
        calls: every call but listings of events, as METHOD path.
        fault: answer to every call but /version: a status, "hang", or "garbage"; empty for none.
        create_fault: the status of every create, after which nothing was made; 0 for none.
        start_fault: the text with which every start fails; empty for none.
        kill_fault: the status of every signal, which is then not sent; 0 for none.
        stuck: names of containers that no signal can be sent to.
        hung: names of containers of which nothing is told but that they are there, ever.
        forgets_gpus: whether it drops requests for devices, as Podman does.
        ignores_filters: whether it lists what was not asked for too.
        lists_health: whether listings tell of health, as Docker's do.
        conflict: status for a name that is taken: 409, or 500 as Podman says.
        pull_gate: pulls end when it is set.
    """

    containers: dict[str, Container] = field(default_factory=dict)
    images: set[str] = field(default_factory=lambda: {"worker:1"})
    registry: set[str] = field(default_factory=set)
    calls: list[str] = field(default_factory=list)
    fault: str = ""
    create_fault: int = 0
    start_fault: str = ""
    kill_fault: int = 0
    stuck: set[str] = field(default_factory=set)
    hung: set[str] = field(default_factory=set)
    forgets_gpus: bool = False
    ignores_filters: bool = False
    lists_health: bool = True
    conflict: int = 409
    pull_gate: asyncio.Event = field(default_factory=asyncio.Event)
    _listeners: set[asyncio.Queue[bytes]] = field(default_factory=set)

    def add(self, name: str, config: dict[str, object], state: str = "running") -> Container:
        one = Container(f"id{len(self.containers)}-{name}", name, config, state)
        self.containers[one.id] = one
        return one

    def named(self, name: str) -> Container | None:
        return next((one for one in self.containers.values() if name in {one.id, one.name}), None)

    def change(self, one: Container, state: str, exit_code: int = 0, health: str = "") -> None:
        one.state, one.exit_code, one.health = state, exit_code, health
        self.happened()

    def happened(self) -> None:
        for queue in self._listeners:
            queue.put_nowait(b'{"Type":"container","Action":"die","time":1}\n')

    def count(self, end: str) -> int:
        """How many calls ended like this."""
        return sum(call.endswith(end) for call in self.calls)

    @web.middleware
    async def _misbehave(self, request: web.Request, handler: object) -> web.StreamResponse:
        path = "/" + request.path.partition("/")[2].partition("/")[2]
        if request.path != "/version" and path != "/events":
            self.calls.append(f"{request.method} {path}")
            match self.fault:
                case "":
                    pass
                case "hang":
                    await asyncio.sleep(3600)
                case "garbage":
                    return web.Response(text="<html>hello</html>", content_type="text/html")
                case status:
                    return web.json_response({"message": "no"}, status=int(status))
        assert callable(handler)
        answer = await handler(request)
        assert isinstance(answer, web.StreamResponse)
        return answer

    async def _one(self, request: web.Request) -> Container:
        one = self.named(request.match_info["id"])
        if one is None:
            raise web.HTTPNotFound(text='{"message": "no such container"}', content_type="application/json")
        if one.name in self.hung:
            await asyncio.sleep(3600)
        return one

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"ApiVersion": "1.43"})

    async def _list(self, request: web.Request) -> web.Response:
        [label] = json.loads(request.query["filters"])["label"]
        key, _, value = label.partition("=")
        return web.json_response(
            [
                {
                    "Id": one.id,
                    "Names": [f"/{one.name}"],
                    "State": one.state,
                    "Status": f"Up ({one.health})" if one.health and self.lists_health else "Up",
                    "Labels": one.config.get("Labels"),
                }
                for one in self.containers.values()
                if self.ignores_filters or _labels(one).get(key) == value
            ]
        )

    async def _create(self, request: web.Request) -> web.Response:
        config = await request.json()
        if self.create_fault:
            return _error(self.create_fault, "cannot make it")
        if self.named(request.query["name"]):
            return _error(self.conflict, "the name is taken")
        if config["Image"] not in self.images:
            return _error(404, f"No such image: {config['Image']}")
        if self.forgets_gpus:
            config["HostConfig"].pop("DeviceRequests", None)
        one = self.add(request.query["name"], config, "created")
        return web.json_response({"Id": one.id, "Warnings": []}, status=201)

    async def _inspect(self, request: web.Request) -> web.Response:
        one = await self._one(request)
        return web.json_response(
            {
                "Id": one.id,
                "Name": f"/{one.name}",
                "State": {
                    "Status": one.state,
                    "Pid": 4711 if one.state == "running" else 0,
                    "ExitCode": one.exit_code,
                    "Health": {"Status": one.health} if one.health else None,
                },
                "HostConfig": one.config.get("HostConfig", {}),
                "Config": {"Labels": one.config.get("Labels"), "StopSignal": one.config.get("StopSignal")},
            }
        )

    async def _start(self, request: web.Request) -> web.Response:
        one = await self._one(request)
        if self.start_fault:
            return _error(500, self.start_fault)
        self.change(one, "running")
        return web.Response(status=204)

    async def _kill(self, request: web.Request) -> web.Response:
        one = await self._one(request)
        if self.kill_fault or one.state != "running":
            return _error(self.kill_fault or 409, "cannot be sent")
        if one.name in self.stuck:
            return _error(500, "tried to kill container, but did not receive an exit event")
        one.signals.append(request.query["signal"])
        if one.signals[-1] == "SIGKILL":
            self.change(one, "exited", 137, one.health)
        return web.Response(status=204)

    async def _remove(self, request: web.Request) -> web.Response:
        one = await self._one(request)
        if one.state == "running":
            return _error(409, "it runs")
        del self.containers[one.id]
        return web.Response(status=204)

    async def _pull(self, request: web.Request) -> web.Response:
        image = f"{request.query['fromImage']}"
        await self.pull_gate.wait()
        if image not in self.registry:
            return web.json_response({"error": "denied", "errorDetail": {"message": "denied"}})
        self.images.add(image)
        return web.json_response({"status": "done"})

    async def _events(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_type = "application/json"
        await response.prepare(request)
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        self._listeners.add(queue)
        try:
            while True:
                await response.write(await queue.get())
        finally:
            self._listeners.discard(queue)

    @asynccontextmanager
    async def served(self, socket: Path) -> AsyncGenerator[None]:
        """Answer on this socket until the block ends; may be entered again."""
        app = web.Application(middlewares=[self._misbehave])
        base = "/{version:v[0-9.]+}"
        app.add_routes(
            [
                web.get("/version", self._version),
                web.get(f"{base}/containers/json", self._list),
                web.post(f"{base}/containers/create", self._create),
                web.get(base + "/containers/{id}/json", self._inspect),
                web.post(base + "/containers/{id}/start", self._start),
                web.post(base + "/containers/{id}/kill", self._kill),
                web.delete(base + "/containers/{id}", self._remove),
                web.post(f"{base}/images/create", self._pull),
                web.get(f"{base}/events", self._events),
            ]
        )
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.UnixSite(runner, str(socket)).start()
            yield
        finally:
            await runner.cleanup()


def _labels(one: Container) -> dict[str, str]:
    found = one.config.get("Labels")
    return found if isinstance(found, dict) else {}


def _error(status: int, message: str) -> web.Response:
    # Engines name no charset, and the client library looks for exactly this.
    body = json.dumps({"message": message}).encode()
    return web.Response(body=body, status=status, headers={"Content-Type": "application/json"})
