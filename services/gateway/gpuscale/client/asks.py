"""Requests for GPUs as Python options. What is absent or None is left to the server."""

import getpass
import os
import platform
import uuid
from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any, TypedDict

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.client.orders import shown, when_moved
from gpuscale.common.errors import InvalidArgumentError
from gpuscale.common.names import booking_name, node_name
from gpuscale.common.sizes import to_bytes, to_seconds
from gpuscale.common.wire import to_duration

LONGEST_WAIT = 604_800.0
"""Seconds; the longest that the API allows."""
USUAL_GRACE, LONGEST_GRACE = 60.0, 86_400.0
"""Seconds that a command is taken to need to save its work where it does not say, and the most that a plan counts."""
TO_START_AND_STOP = 60
"""Most seconds for a command to start on another host, and to stop at its time limit."""


class AskOptions(TypedDict, total=False):
    """Which GPUs qualify. Their number is separate."""

    min_memory: int | str | None
    """Least free memory of each GPU: bytes, or a text such as `8GiB`, like every size here."""
    max_utilization_percent: float | None
    """Each GPU's utilization must be below this; 100 admits any."""
    allow_unknown_utilization: bool | None
    """Whether to admit GPUs whose utilization cannot be read; None: only with `mig_profile`."""
    gpu_milli: int | None
    """Share of each GPU in thousandths; below 1000 others may get the rest."""
    gpu_memory: int | str | None
    """Memory of each GPU to set aside for a share."""
    mig_profile: str
    """MIG instances of this profile, such as `1g.10gb`."""
    models: Sequence[str]
    """Product names, or parts of them; any one may match."""
    cpu_milli: int
    """CPU of the node that each member takes, in thousandths of a core."""
    host_memory: int | str | None
    """Main memory of the node that each member takes."""
    nodes: Sequence[str]
    """Only these nodes, as `host-1` or `nodes/host-1`."""
    excluded_nodes: Sequence[str]
    """None of these nodes."""
    only_gpus: Sequence[str]
    """Only these GPUs, as `nodes/{node}/gpus/{gpu}`."""
    excluded_gpus: Sequence[str]
    """None of these GPUs."""
    node_labels: Mapping[str, str]
    """Only nodes with these labels."""
    apart_from: Mapping[str, str]
    """Only nodes without a live reservation with these labels."""
    gpu_set: str
    """`nvlink` or `memory_balanced`: which GPUs of a node to prefer; by default the best by score."""
    power_limit_watts: float | None
    """Most power of each GPU."""
    member_count: int | None
    """Number of members, each with that many GPUs, all or none."""
    gang_strategy: str
    """`pack`, `strict_pack`, `spread` or `strict_spread`: how to place members on nodes."""
    policy: str
    """`spread`, `pack`, `bestfit`, `firstfit` or `fgd`: how to pick GPUs."""


class ReserveOptions(AskOptions, total=False):
    """Options of `reserve`, apart from the number of GPUs and the holder."""

    ttl: float | str | None
    """How long the lease lasts from each renewal: seconds, or a text such as `30s` or `5m`."""
    labels: Mapping[str, str]
    """The holder's own labels."""
    anywhere: bool
    """Whether to allow GPUs of any host. On a node, without `nodes` and `only_gpus`, the default is this host only."""
    request_id: str | None
    """A UUID that makes the call idempotent; a new one by default."""
    wait: float | str | None
    """How long to wait in the queue: seconds, or a text; by default not at all."""
    tenant: str
    """Tenant whose quota it counts against; the caller's by default."""
    owner: str
    """Owner of the reservation, for admins; the caller by default."""
    priority: int
    """Higher priorities are served first."""
    preemptible: bool
    """Whether a request of higher priority may end it."""
    may_preempt: bool
    """Whether it may end preemptible reservations of lower priority."""
    time_limit: float | str | None
    """It ends after this time, even if renewed, so it may use GPUs booked for later. `run` warns its command and stops it
    before."""
    booking: str
    """A booking of the caller to place it in, such as `demo` or `bookings/demo`."""


class RunOptions(ReserveOptions, total=False):
    """Options of `run`, apart from the command and the number of GPUs. `wait` is 7 days by default, and may be 0."""

    title: str
    """Title of the job."""
    directory: str
    """Working directory on each node; the current directory by default."""
    environment: Mapping[str, str]
    """Environment variables for the command, in addition to its host's."""
    stop_together: bool
    """Whether a failed member stops the others; true by default."""
    user: str
    """Unix user on the nodes; by default as ssh is configured."""
    on_move: str
    """`signal:USR1`, or `signal:USR1,grace:120s`: a signal with which the command saves its work and ends when its GPUs are to
    be taken away. Then it starts again on other GPUs."""
    via: str
    """Host that starts a job that has to wait; by default this host if it is a node, else the host of the services."""


def ask(gpu_count: int, options: AskOptions) -> allocator_api.Ask:
    """The `Ask` message for these options.

    Raises:
        TypeError: an unknown option.
        ValueError: an unknown policy, strategy or set, or no size; the message names the option.
    """
    _refuse_unknown(options, AskOptions)
    return _ask(gpu_count, options)


def _ask(gpu_count: int, options: AskOptions) -> allocator_api.Ask:
    return allocator_api.Ask(
        gpu_count=gpu_count,
        min_memory_bytes=_bytes("min_memory", options.get("min_memory")),
        max_utilization_percent=options.get("max_utilization_percent"),
        allow_unknown_utilization=options.get("allow_unknown_utilization"),
        gpu_milli=options.get("gpu_milli"),
        gpu_memory_bytes=_bytes("gpu_memory", options.get("gpu_memory")),
        mig_profile=options.get("mig_profile", ""),
        models=options.get("models", ()),
        cpu_milli=options.get("cpu_milli", 0),
        host_memory_bytes=_bytes("host_memory", options.get("host_memory")) or 0,
        nodes=map(_node, options.get("nodes", ())),
        excluded_nodes=map(_node, options.get("excluded_nodes", ())),
        gpus=options.get("only_gpus", ()),
        excluded_gpus=options.get("excluded_gpus", ()),
        node_labels=options.get("node_labels", {}),
        apart_from=options.get("apart_from", {}),
        gpu_set=allocator_api.GpuSet.Value(_enum("GPU_SET", options.get("gpu_set", ""))),
        power_limit_watts=options.get("power_limit_watts"),
        member_count=options.get("member_count"),
        gang_strategy=allocator_api.GangStrategy.Value(
            _enum("GANG_STRATEGY", options.get("gang_strategy", ""))
        ),
        policy=allocator_api.PlacementPolicy.Value(_enum("PLACEMENT_POLICY", options.get("policy", ""))),
    )


def reserve_request(gpu_count: int, holder: str, options: ReserveOptions) -> allocator_api.ReserveRequest:
    """The request that `reserve` sends.

    Raises:
        TypeError: an unknown option.
        ValueError: an unknown policy, strategy or set, or no size or duration; the message names the option.
    """
    _refuse_unknown(options, ReserveOptions)
    return _reserve_request(gpu_count, holder, options)


def job_request(
    command: Sequence[str], gpu_count: int, members: int, options: RunOptions
) -> allocator_api.ReserveRequest:
    """The request that `run` sends. Raises the same errors as `reserve_request`."""
    _refuse_unknown(options, RunOptions)
    request = _reserve_request(gpu_count, default_holder(), options)
    request.ask.member_count = members
    wait = as_seconds("wait", options.get("wait", LONGEST_WAIT))
    request.ClearField("wait")
    if wait:
        request.wait.CopyFrom(to_duration(wait))
    request.keep_place = bool(wait)
    title, user = options.get("title", ""), options.get("user", "")
    return of_a_job(request, title, command, user, moving(options))


def moving(options: RunOptions) -> dict[str, Any]:
    """The option `on_move` as fields of `Orders`; empty without it. Raises ValueError: it cannot be parsed."""
    text = options.get("on_move", "")
    try:
        return when_moved(text) if text else {}
    except ValueError as error:
        raise ValueError(f"on_move: {error}") from None


def of_a_job(
    request: allocator_api.ReserveRequest,
    title: str,
    command: Sequence[str],
    user: str,
    on_move: Mapping[str, Any],
) -> allocator_api.ReserveRequest:
    """The request for a job: it outlasts the command's time limit, and one member that saves its work may be moved.

    The time limit starts with the command and includes a warning.
    """
    request.job.title, request.job.command, request.job.user = title, shown(command), user
    if request.HasField("time_limit"):
        request.time_limit.seconds += TO_START_AND_STOP
    if on_move and request.ask.member_count <= 1:
        request.movable.FromSeconds(ceil(min(on_move["move_grace"] or USUAL_GRACE, LONGEST_GRACE)))
    return request


def _reserve_request(gpu_count: int, holder: str, options: ReserveOptions) -> allocator_api.ReserveRequest:
    ttl, wait = as_seconds("ttl", options.get("ttl")), as_seconds("wait", options.get("wait"))
    limit, booking = as_seconds("time_limit", options.get("time_limit")), options.get("booking", "")
    if limit is not None and limit < 1:
        raise InvalidArgumentError("time_limit must be at least 1s", field="time_limit")
    return allocator_api.ReserveRequest(
        request_id=options.get("request_id") or str(uuid.uuid4()),
        holder=holder,
        ask=_ask(gpu_count, options),
        ttl=None if ttl is None else to_duration(ttl),
        labels=options.get("labels", {}),
        wait=None if wait is None else to_duration(wait),
        tenant=options.get("tenant", ""),
        owner=options.get("owner", ""),
        priority=options.get("priority", 0),
        preemptible=options.get("preemptible", False),
        may_preempt=options.get("may_preempt", False),
        time_limit=None if limit is None else to_duration(limit),
        booking=booking if "/" in booking or not booking else booking_name(booking),
    )


def default_holder() -> str:
    """The default holder, USER@HOST; with the user's number if it has no name, as in containers."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # before Python 3.13, and since
        user = str(os.getuid())
    return f"{user}@{platform.node()}"


def as_seconds(name: str, duration: float | str | None) -> float | None:
    """The seconds of an option given as number or text; None if absent.

    Raises ValueError: the text is not a duration; the message names the option.
    """
    try:
        return None if duration is None else to_seconds(duration)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _node(name: str) -> str:
    return name if "/" in name else node_name(name)


def _bytes(name: str, size: int | str | None) -> int | None:
    try:
        return None if size is None else to_bytes(size)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _refuse_unknown(options: Mapping[str, object], kind: type) -> None:
    unknown = sorted(options.keys() - kind.__annotations__.keys())
    if unknown:
        raise TypeError(f"unknown option: {', '.join(unknown)}")


def _enum(prefix: str, word: str) -> str:
    return f"{prefix}_{word.upper() or 'UNSPECIFIED'}"
