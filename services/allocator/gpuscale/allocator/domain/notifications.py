"""Notifications: which events of reservations, nodes and use policies go to which webhooks, and their text. Pure.

The body is one JSON object, of which Slack and Mattermost show `text`. If the target has a secret, the body is signed:
HMAC-SHA256 (RFC 2104) over the time of sending, a dot, and the body, so that receivers can reject replays by the time.
"""

import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from gpuscale.allocator.domain.model import Reservation, State
from gpuscale.allocator.domain.use_policies import Action, PolicyAct, StageOutcome, span
from gpuscale.common.names import reservation_name
from gpuscale.common.sizes import counted

SIGNATURE = "gpuscale-signature"
"""Name of the header with the signature."""
_EMBEDS_IPV4 = IPv6Network("64:ff9b::/96")


class EventKind(StrEnum):
    """The kind of an event."""

    GRANTED = "granted"
    ENDING = "ending"
    REVOKED = "revoked"
    LOST = "lost"
    JOB_ENDED = "job_ended"
    NODE_DOWN = "node_down"
    GPU_QUARANTINED = "gpu_quarantined"
    POLICY = "policy"


@dataclass(frozen=True, slots=True)
class NotifiedEvent:
    """An event of a resource, in words. `holder` and `policy` are empty if there is none."""

    kind: EventKind
    subject: str
    text: str
    time: datetime
    holder: str = ""
    policy: str = ""
    exit_code: int | None = None


@dataclass(frozen=True, slots=True)
class Webhook:
    """A webhook and the events it wants: empty kinds, holders and policies admit all."""

    url: str = field(repr=False)
    secret: str = field(default="", repr=False)
    kinds: frozenset[EventKind] = frozenset()
    holders: frozenset[str] = frozenset()
    policies: frozenset[str] = frozenset()

    def wants(self, event: NotifiedEvent) -> bool:
        """Whether it gets an event."""
        if self.policies and event.policy and event.policy not in self.policies:
            return False
        if self.holders and event.holder not in self.holders:
            return False
        return not self.kinds or event.kind in self.kinds


def of_change(was: Reservation | None, now: Reservation, clock: float, wall: datetime) -> list[NotifiedEvent]:
    """The events of a changed reservation; `was` is its earlier value, None if it ends."""
    found: list[tuple[EventKind, str, int | None]] = []
    name = reservation_name(now.id)
    who = f"{name} of {now.holder}{f' ({now.job.title})' if now.job and now.job.title else ''}"
    if was is not None and was.waiting and not now.waiting and now.live:
        nodes = ", ".join(dict.fromkeys(gpu.node for gpu in now.gpus))
        told = f"{who} waited and has {counted(len(now.gpus), 'GPU')} now, on {nodes}"
        found.append((EventKind.GRANTED, told, None))
    if was is not None and now.live and now.revoke_at is not None and was.revoke_at is None:
        left = span(max(0.0, now.revoke_at - clock))
        found.append((EventKind.ENDING, f"{who} will be revoked in {left}: {now.end_reason}", None))
    code = now.job.exit_code(now.member_count) if now.job else None
    if was is not None and code is not None and (not was.job or was.job.exit_code(was.member_count) is None):
        found.append((EventKind.JOB_ENDED, f"the job of {who} ended with exit code {code}", code))
    if now.state is State.LOST:
        found.append((EventKind.LOST, f"{who} is lost: {now.end_reason}", None))
    elif now.state in {State.EXPIRED, State.CANCELLED} and not now.waiting:
        why = now.end_reason or "its lease was not renewed"
        found.append((EventKind.REVOKED, f"{who} ended: {why}", None))
    return [NotifiedEvent(kind, name, text, wall, now.holder, exit_code=code) for kind, text, code in found]


def of_act(act: PolicyAct, holders: Sequence[str]) -> list[NotifiedEvent]:
    """The events of a policy's act: one per holder, one if nobody holds the GPU, none unless the act notifies."""
    carried_out = {StageOutcome.DONE, StageOutcome.REFUSED, StageOutcome.ASKED}
    if act.outcome not in carried_out or Action.NOTIFY not in act.actions:
        return []
    untold = {Action.NOTIFY} if act.outcome is StageOutcome.DONE else {Action.NOTIFY, Action.KILL}
    others = [one.value for one in act.actions if one not in untold]
    said = f"policy {act.policy}: {act.subject}{' of ' + ', '.join(holders) if holders else ''}: {act.reason}"
    if Action.REVOKE in act.actions:
        others[-1] = f"it will be revoked in {span(act.grace)}"
    text = f"{said} ({', '.join(others)})" if others else said
    return [
        NotifiedEvent(EventKind.POLICY, act.subject, text, act.time, holder, act.policy)
        for holder in holders or ("",)
    ]


def body_of(event: NotifiedEvent, number: int) -> bytes:
    """The body of a notification; `id` stays the same on every attempt."""
    said: Mapping[str, str | int | None] = {
        "text": event.text,
        "id": str(number),
        "event": event.kind.value,
        "time": event.time.isoformat(timespec="seconds"),
        "subject": event.subject,
        "holder": event.holder or None,
        "policy": event.policy or None,
        "exit_code": event.exit_code,
    }
    return json.dumps({key: value for key, value in said.items() if value is not None}).encode()


def signature(secret: str, body: bytes, seconds: int) -> str:
    """The value of the signature header for a body sent at `seconds` since 1970."""
    digest = hmac.digest(secret.encode(), b"%d.%s" % (seconds, body), "sha256").hex()
    return f"t={seconds},v1={digest}"


Networks = Sequence[IPv4Network | IPv6Network]


def networks(texts: Sequence[str]) -> Networks:
    """Parse networks such as `10.0.0.0/8`. Raises ValueError for an invalid one."""
    return [ip_network(one) for one in texts]


def permitted(address: str, allowed: Networks) -> bool:
    """Whether an IP address may be contacted: it is in an allowed network, or is a public unicast address."""
    found = ip_address(address)
    if isinstance(found, IPv6Address):
        found = found.ipv4_mapped or found
    if any(found in network for network in allowed):
        return True
    if isinstance(found, IPv6Address) and (found in _EMBEDS_IPV4 or found.sixtofour or found.teredo):
        return False
    return found.is_global and not found.is_multicast
