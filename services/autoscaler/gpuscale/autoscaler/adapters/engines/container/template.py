"""What the adapter's own file says of a container, checked; and the request that makes one of it. Pure.

The request is that of `POST /containers/create` of Docker's API. It names GPUs by UUID in a device request of the driver
`nvidia`, and never in CUDA_VISIBLE_DEVICES or NVIDIA_VISIBLE_DEVICES beside it: inside the container the GPUs count from 0
again, and a second list would pick from the wrong ones.
"""

from __future__ import annotations

import posixpath
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import re2

from gpuscale.autoscaler.adapters.engines.container import containers as marks
from gpuscale.autoscaler.adapters.templates import (
    LaunchRefusedError,
    Placeholder,
    ReplicaOrder,
    check_environment,
    fill_arguments,
)

Json: TypeAlias = str | int | float | bool | Sequence["Json"] | Mapping[str, "Json"] | None
Argument: TypeAlias = tuple[str | Placeholder, ...]

PYTHON = "python3"
"""What {python} stands for in a container; the adapter's own interpreter is not in there."""
NO_GPUS = "NVIDIA_VISIBLE_DEVICES=void"
"""Keeps an image that says NVIDIA_VISIBLE_DEVICES=all, as CUDA's do, from every GPU where nvidia is the default runtime."""

_SECOND = 1_000_000_000
_CLOSED = (
    "/boot",
    "/dev",
    "/etc",
    "/proc",
    "/run",
    "/sys",
    "/var/lib/containers",
    "/var/lib/docker",
    "/var/run",
)
"""Directories that a container must not see: who writes there, or reaches an engine's socket, owns the host."""
_GPU_VARIABLE = re.compile(r"(NVIDIA|CUDA)_VISIBLE_DEVICES")


@dataclass(frozen=True, slots=True)
class Mount:
    """A directory of the host that a container sees."""

    source: str
    target: str
    read_only: bool


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """How the engine asks a container whether it is well; no command: it does not, whatever the image says. Seconds."""

    command: tuple[Argument, ...]
    period: float
    timeout: float
    failures: int
    start_timeout: float


@dataclass(frozen=True, slots=True)
class ContainerTemplate:
    """A template, checked; sizes in bytes, 0 or nothing for what the engine or the image says by itself.

    Attributes:
        name: what endpoints know it by.
        image: what is run.
        pull: whether an image that is missing is fetched.
        entrypoint: the program, where it is not the image's.
        command: the arguments, each as texts and placeholders in a row.
        env: variables set for it.
        pass_env: variables handed on from the adapter's own environment, which must have them.
        working_dir: where it begins.
        user: as whom it runs.
        memory: most of the host's memory; there is no swap beyond it.
        cpus: most CPUs.
        shm_size: size of /dev/shm.
        pids: most processes and threads.
        network: name of the network, `host` or `none`.
        stop_signal: what asks it to finish.
        init: whether a small first process hands on signals and reaps.
        read_only: whether its file system is read-only, but for /tmp.
        drop_capabilities: whether it has none, also as root.
        mounts: directories of the host that it sees.
        health_check: how it is asked whether it is well, where the image's way is not to be taken.
    """

    name: str
    image: str
    pull: bool = True
    entrypoint: tuple[str, ...] = ()
    command: tuple[Argument, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    pass_env: tuple[str, ...] = ()
    working_dir: str = ""
    user: str = ""
    memory: int = 0
    cpus: float = 0.0
    shm_size: int = 0
    pids: int = 0
    network: str = "bridge"
    stop_signal: str = ""
    init: bool = False
    read_only: bool = False
    drop_capabilities: bool = True
    mounts: tuple[Mount, ...] = ()
    health_check: HealthCheck | None = None


@dataclass(frozen=True, slots=True)
class Logs:
    """How the engine keeps what a container writes; `driver` empty: as it keeps all others, without a bound of ours."""

    driver: str
    max_bytes: int


def check_variables(env: Mapping[str, str], pass_env: Iterable[str]) -> None:
    """Check the variables that a template sets and hands on.

    Raises:
        ValueError: a name that is none, one that the adapter sets or that picks GPUs, or a NUL character.
    """
    listed = tuple(pass_env)
    for name in (*env, *listed):
        if _GPU_VARIABLE.fullmatch(name):
            raise ValueError(f"{name} must not be set: the adapter asks the engine for the GPUs")
    check_environment(env, listed)


def check_path(path: str) -> str:
    """Check that a path is absolute and plain, and return it.

    Raises:
        ValueError: it is not.
    """
    if not path.startswith("/") or path.startswith("//") or posixpath.normpath(path) != path:
        raise ValueError("must be an absolute path without . and ..")
    if not path.isprintable():
        raise ValueError("must be printable")
    return path


def check_source(path: str) -> str:
    """Check that a directory of the host may be shown to containers, and return it.

    Raises:
        ValueError: it may not: it holds the host's own parts, or is one of them.
    """
    above = check_path(path).rstrip("/") + "/"
    if any(path == closed or path.startswith(f"{closed}/") or closed.startswith(above) for closed in _CLOSED):
        raise ValueError("must not be, hold or lie in a directory of the system")
    return path


def check_signal(name: str) -> str:
    """Check that a signal can ask a container to finish, and return its name.

    Raises:
        ValueError: there is none of that name, or it leaves no choice.
    """
    if name and (name not in signal.Signals.__members__ or name in {"SIGKILL", "SIGSTOP"}):
        raise ValueError("must be the name of a signal that can be handled, such as SIGTERM")
    return name


def container_request(
    adapter: str, template: ContainerTemplate, order: ReplicaOrder, environment: Mapping[str, str], logs: Logs
) -> dict[str, Json]:
    """The body of the request that makes a replica's container.

    Args:
        adapter: id of the adapter.
        template: how.
        order: which replica, with which values and GPUs.
        environment: the adapter's own, of which the template's `pass_env` is handed on, and nothing else.
        logs: how its output is kept.

    Raises:
        LaunchRefusedError: a value or a variable is missing, is of no use, or is not what its placeholder takes.
    """
    check = template.health_check
    asked = check.command if check else ()
    arguments = fill_arguments(template.name, (*template.command, *asked), order, PYTHON)
    command, test = arguments[: len(template.command)], arguments[len(template.command) :]
    request: dict[str, Json] = {
        "Image": template.image,
        "Env": _environment(template, order, environment),
        "Labels": marks.labels(adapter, order),
        "HostConfig": _host(template, order, logs),
    }
    if check is not None:
        request["Healthcheck"] = _health(check, test)
    given: dict[str, Json] = {
        "Entrypoint": template.entrypoint,
        "Cmd": command,
        "WorkingDir": template.working_dir,
        "User": template.user,
        "StopSignal": template.stop_signal,
    }
    return request | {name: value for name, value in given.items() if value}


def _host(template: ContainerTemplate, order: ReplicaOrder, logs: Logs) -> dict[str, Json]:
    """What the container gets of its host: bounded, without privileges, and gone only when we remove it."""
    host: dict[str, Json] = {
        "Privileged": False,
        "SecurityOpt": ["no-new-privileges"],
        "CapDrop": ["ALL"] if template.drop_capabilities else [],
        "NetworkMode": template.network,
        "RestartPolicy": {"Name": "no"},
        "AutoRemove": False,
        "Init": template.init,
    }
    given: dict[str, Json] = {
        "Memory": template.memory,
        "MemorySwap": template.memory,
        "NanoCpus": round(template.cpus * _SECOND),
        "ShmSize": template.shm_size,
        "PidsLimit": template.pids,
        "Mounts": [_mount(mount) for mount in template.mounts],
    }
    host |= {name: value for name, value in given.items() if value}
    if template.read_only:
        host |= {"ReadonlyRootfs": True, "Tmpfs": {"/tmp": ""}}  # noqa: S108 - the container's own
    if logs.driver:
        options: dict[str, Json] = {"max-size": str(logs.max_bytes), "max-file": "2"}
        host["LogConfig"] = {"Type": logs.driver, "Config": options}
    if order.gpu_uuids:
        host["DeviceRequests"] = [
            {"Driver": "nvidia", "DeviceIDs": list(order.gpu_uuids), "Capabilities": [["gpu"]]}
        ]
    return host


def _mount(mount: Mount) -> dict[str, Json]:
    return {
        "Type": "bind",
        "Source": mount.source,
        "Target": mount.target,
        "ReadOnly": mount.read_only,
        "BindOptions": {"Propagation": "rprivate"},
    }


def _health(check: HealthCheck, test: Sequence[str]) -> dict[str, Json]:
    if not test:
        return {"Test": ["NONE"]}
    return {
        "Test": ["CMD", *test],
        "Interval": round(check.period * _SECOND),
        "Timeout": round(check.timeout * _SECOND),
        "Retries": check.failures,
        "StartPeriod": round(check.start_timeout * _SECOND),
    }


def _environment(
    template: ContainerTemplate, order: ReplicaOrder, environment: Mapping[str, str]
) -> list[str]:
    missing = [name for name in template.pass_env if name not in environment]
    if missing:
        raise LaunchRefusedError(
            f"template {template.name} hands on {missing[0]}, which the adapter's environment does not have"
        )
    values = {
        **{name: environment[name] for name in template.pass_env},
        **template.env,
        "GPUSCALE_ENDPOINT": order.endpoint,
        "GPUSCALE_FENCE": str(order.fence),
        "GPUSCALE_GPU_UUIDS": ",".join(order.gpu_uuids),
        "GPUSCALE_REPLICA": order.replica,
        "GPUSCALE_RESERVATION": order.reservation,
    }
    given = [f"{name}={value}" for name, value in values.items()]
    return given if order.gpu_uuids else [*given, NO_GPUS]


_REFERENCE = re.compile(r"[a-z0-9][A-Za-z0-9._/:@-]{0,511}")


def check_image(image: str) -> None:
    """Check that a text can be the name of an image.

    Raises:
        ValueError: it cannot.
    """
    if not _REFERENCE.fullmatch(image) or "//" in image:
        raise ValueError("must be the name of an image, such as registry.example/team/worker:1.2")


def is_allowed(image: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern fits the whole name, as it is written, tag or digest with it; no pattern lets nothing through.

    A `*` stands for any characters but a slash, so that it never reaches into another registry or folder of one.
    """
    return any(_compiled(pattern).fullmatch(image) for pattern in patterns)


def _compiled(pattern: str) -> re2.Pattern:
    return re2.compile("[^/]*".join(re2.escape(part) for part in pattern.split("*")))
