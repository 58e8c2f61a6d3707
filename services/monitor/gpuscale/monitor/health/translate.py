"""From health events and quarantines to the messages of the contract."""

from collections.abc import Mapping

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common.names import gpu_name
from gpuscale.monitor.model.health import Event, Quarantine
from gpuscale.monitor.wire.dates import Dates


def to_event(event: Event, dates: Dates) -> monitor_api.HealthEvent:
    """An event as a message."""
    return monitor_api.HealthEvent(
        name=f"healthEvents/{event.id}",
        check=monitor_api.HealthCheck.Value(f"HEALTH_CHECK_{event.check.name}"),
        severity=monitor_api.HealthSeverity.Value(f"HEALTH_SEVERITY_{event.finding.severity.name}"),
        fatal=event.finding.fatal,
        node=event.node,
        uuid=event.uuid,
        gpu=gpu_name(event.node, event.uuid) if event.uuid else "",
        recommended_action=monitor_api.RecommendedAction.Value(
            f"RECOMMENDED_ACTION_{event.finding.action.name}"
        ),
        xid=event.xid,
        message=event.finding.message,
        start_time=dates.timestamp(event.started_at),
        last_time=dates.timestamp(event.last_at),
        resolved_time=None if event.resolved_at is None else dates.timestamp(event.resolved_at),
        count=event.count,
        cleared=event.cleared,
    )


def to_quarantines(found: Mapping[str, Quarantine], dates: Dates) -> dict[str, monitor_api.Quarantine]:
    """Quarantines as messages, by UUID in lower case."""
    return {
        uuid: monitor_api.Quarantine(uuid=uuid, reason=one.reason, start_time=dates.timestamp(one.since))
        for uuid, one in found.items()
    }
