"""Health checks of replicas: what a template's probe asks, and what consecutive answers mean.

Terms and semantics are those of Kubernetes' probes, with a single probe for readiness and liveness: the first success makes a
replica READY, and `failures` in a row make it FAILED. Until the first success, failures only count once `start_timeout` is
over, so that a model may load slowly while a hanging replica is still noticed quickly afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from urllib.parse import urlsplit

from gpuscale.autoscaler.adapters.templates import INHERITED, parse_argument

HTTP_PORT = 80
_MAX_STATUS_LINE = 4096
_END_SECONDS = 1.0
_WELL = range(200, 400)


class ProbeKind(Enum):
    """The kind of a probe."""

    EXEC = "exec"
    """A program that ends with 0."""
    TCP = "tcp"
    """A connection to HOST:PORT."""
    HTTP = "http"
    """A GET of an http:// URL that is answered with a status of 200 to 399."""


@dataclass(frozen=True, slots=True)
class Timing:
    """The timing of checks: seconds, and consecutive failures."""

    initial_delay: float = 0.0
    period: float = 5.0
    timeout: float = 1.0
    failures: int = 3
    start_timeout: float = 300.0


@dataclass(frozen=True, slots=True)
class Probe:
    """A probe with all values filled in: a program's arguments, or one address."""

    kind: ProbeKind
    target: tuple[str, ...]
    timing: Timing


class Verdict(Enum):
    """What an answer means for a replica."""

    GOES_ON = "goes on"
    READY = "ready"
    UNHEALTHY = "unhealthy"


class Health:
    """The answers of a replica started, or taken over, at `since`, in seconds since boot like every time here."""

    def __init__(self, timing: Timing, since: float, *, ready: bool) -> None:
        self._timing = timing
        self._start_ends = since + timing.start_timeout
        self._ready = ready
        self._failures = 0

    def answered(self, problem: str, now: float) -> Verdict:
        """Take an answer; `problem` is empty if it is healthy."""
        if not problem:
            first, self._ready, self._failures = not self._ready, True, 0
            return Verdict.READY if first else Verdict.GOES_ON
        if self._ready or now >= self._start_ends:
            self._failures += 1
        return Verdict.UNHEALTHY if self._failures >= self._timing.failures else Verdict.GOES_ON


def check_address(kind: ProbeKind, address: str) -> None:
    """Check a probe's address, placeholders included; ValueError if it is not HOST:PORT or an http:// URL."""
    if kind is ProbeKind.HTTP and not address.startswith("http://"):
        raise ValueError("must begin with http://")
    if kind is ProbeKind.TCP and not address.rpartition(":")[0]:
        raise ValueError("must be HOST:PORT")
    if not address.isprintable() or " " in address:
        raise ValueError("must hold printable characters and no space")
    parse_argument(address)


def probe_environment(replica: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a probe's program: without the template's variables, which may hold passwords."""
    own = {name: environment[name] for name in INHERITED if name in environment}
    return {**own, "GPUSCALE_REPLICA": replica}


async def ask(
    probe: Probe, env: Mapping[str, str], become: Callable[[tuple[str, ...]], tuple[str, ...]]
) -> str:
    """Check once, within the probe's timeout; returns why the replica is not healthy, or nothing."""
    try:
        async with asyncio.timeout(probe.timing.timeout):
            match probe.kind:
                case ProbeKind.EXEC:
                    return await _run(become(probe.target), env)
                case ProbeKind.TCP:
                    host, _, port = probe.target[0].rpartition(":")
                    _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
                    writer.close()
                    return ""
                case ProbeKind.HTTP:
                    return await _get(probe.target[0])
    except TimeoutError:
        return f"no answer within {probe.timing.timeout:g} s"
    except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        reason = error.strerror if isinstance(error, OSError) else ""
        return reason or str(error) or type(error).__name__


async def _run(argv: tuple[str, ...], env: Mapping[str, str]) -> str:
    nothing = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=nothing, stdout=nothing, stderr=nothing, env=env
    )
    try:
        code = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            # A process that hangs in the kernel, as anything that calls a GPU's driver may, does not end.
            with suppress(TimeoutError):
                async with asyncio.timeout(_END_SECONDS):
                    await process.wait()
    return "" if code == 0 else f"the program ended with {code}"


async def _get(url: str) -> str:
    """A minimal HTTP request: a complete client costs too much for probing a host's replicas."""
    parts = urlsplit(url)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    reader, writer = await asyncio.open_connection(
        parts.hostname, parts.port or HTTP_PORT, limit=_MAX_STATUS_LINE
    )
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        words = (await reader.readuntil(b"\n")).split(maxsplit=2)
    finally:
        writer.close()
    if len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1].isdigit():
        return "the answer is not HTTP"
    status = int(words[1])
    return "" if status in _WELL else f"HTTP status {status}"
