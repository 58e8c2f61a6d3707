"""Health events as text and back, for the disk. Pure. Times are shifted to the count that is stored, and back."""

import json
from typing import Any

from gpuscale.monitor.model.health import Action, Event, Finding, HealthCheck, HealthSeverity


def to_text(event: Event, shift: float) -> str:
    """An event; `shift` seconds are added to its times."""
    finding = event.finding
    return json.dumps(
        {
            "id": event.id,
            "check": event.check.name,
            "node": event.node,
            "uuid": event.uuid,
            "severity": finding.severity.name,
            "action": finding.action.name,
            "message": finding.message,
            "fatal": finding.fatal,
            "started_at": event.started_at + shift,
            "last_at": event.last_at + shift,
            "xid": event.xid,
            "resolved_at": None if event.resolved_at is None else event.resolved_at + shift,
            "count": event.count,
            "cleared": event.cleared,
            "boot_id": event.boot_id,
        }
    )


def from_text(text: str, shift: float) -> Event:
    """The event of a text; `shift` seconds are taken off its times.

    Raises:
        ValueError: it is not the text of one.
    """
    try:
        found: dict[str, Any] = json.loads(text)
        resolved = found["resolved_at"]
        return Event(
            id=found["id"],
            check=HealthCheck[found["check"]],
            node=found["node"],
            uuid=found["uuid"],
            finding=Finding(
                HealthSeverity[found["severity"]], Action[found["action"]], found["message"], found["fatal"]
            ),
            started_at=found["started_at"] - shift,
            last_at=found["last_at"] - shift,
            xid=found["xid"],
            resolved_at=None if resolved is None else resolved - shift,
            count=found["count"],
            cleared=found["cleared"],
            boot_id=found.get("boot_id", ""),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"this is no health event: {error}") from error
