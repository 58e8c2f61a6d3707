"""What a server notes of each call beside answering it: how often its caller calls, an audit log, and counts.

Only calls that need a caller are looked at; health checks are not.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import grpc
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message

from gpuscale.common.errors import ResourceExhaustedError
from gpuscale.common.rpc.rate_limits import RateLimits
from gpuscale.common.runtime.connections import Connections
from gpuscale.common.security.audit import AuditLog
from gpuscale.common.security.methods import MethodInfo
from gpuscale.common.security.principal import Principal, Role

LONGEST_RESOURCE: Final = 256
"""Characters of a name that the audit log keeps."""
_REFUSALS: Final = frozenset({grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED})
_NAMES: Final = ("name", "parent", "node", "holder", "tenant")


class CallMeter:
    """Counts of calls, by method and status, and of connections."""

    def __init__(self) -> None:
        self.connections = Connections()
        self.open = 0
        self.ended: Counter[tuple[str, str]] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.limited = 0


class CallWatcher:
    """Looks at the calls of one server.

    Args:
        limits: how often each caller may call; None for as often as it likes.
        audit: where changes and refusals are noted; None for nowhere.
        meter: where calls are counted; None for nowhere.
    """

    def __init__(
        self, limits: RateLimits | None = None, audit: AuditLog | None = None, meter: CallMeter | None = None
    ) -> None:
        self._limits = limits
        self._audit = audit
        self._meter = meter

    def admit(self, principal: Principal) -> None:
        """Count a call of a caller.

        Raises:
            ResourceExhaustedError: it calls too often (reason RATE_LIMITED), with the time to wait.
        """
        if self._limits is None:
            return
        wait = self._limits.take(f"{principal.kind}:{principal.name}", time.monotonic())
        if wait:
            if self._meter is not None:
                self._meter.limited += 1
            raise ResourceExhaustedError(
                f"{principal.name} calls too often", reason="RATE_LIMITED", retry_after=wait
            )

    def begun(self) -> None:
        """A call has begun."""
        if self._meter is not None:
            self._meter.open += 1

    def ended(
        self,
        info: MethodInfo,
        principal: Principal | None,
        context: grpc.aio.ServicerContext[Any, Any],
        request: object,
        code: grpc.StatusCode,
        seconds: float,
    ) -> None:
        """A call has ended.

        Args:
            info: its method.
            principal: who called; None for one that was not let in.
            context: of the call.
            request: the bytes of the request, where there is one.
            code: how it ended.
            seconds: how long it took.
        """
        if self._meter is not None:
            self._meter.open -= 1
            self._meter.ended[info.path, code.name] += 1
            self._meter.seconds[info.path] += seconds
        if self._audit is None or not (code in _REFUSALS or (info.role or Role.VIEWER) > Role.VIEWER):
            return
        self._audit.write(
            {
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "who": principal.name if principal else None,
                "role": principal.role.name.lower() if principal else None,
                "by": principal.kind if principal else None,
                "from": context.peer(),
                "method": info.path,
                "resource": resource_of(info.path, request) if isinstance(request, bytes) else None,
                "result": code.name,
                "seconds": round(seconds, 4),
            }
        )


def resource_of(path: str, request: bytes) -> str | None:
    """What a request is about: the name in it, or in a message of it. None where it has none, or is no such message."""
    method = descriptor_pool.Default().FindMethodByName(path.removeprefix("/").replace("/", "."))
    try:
        message = message_factory.GetMessageClass(method.input_type).FromString(request)
    except DecodeError:
        return None
    found = _name_in(message)
    return None if found is None else found[:LONGEST_RESOURCE]


def _name_in(message: Message) -> str | None:
    """The first name in a message, or else in what it holds, one level deep."""
    set_fields: Mapping[str, object] = {field.name: value for field, value in message.ListFields()}
    for name in _NAMES:
        value = set_fields.get(name)
        if isinstance(value, str):
            return value
    for inner in set_fields.values():
        if isinstance(inner, Message):
            value = next((value for field, value in inner.ListFields() if field.name in _NAMES), None)
            if isinstance(value, str):
                return value
    return None
