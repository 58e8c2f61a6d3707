"""Capabilities between the wire and the model: what tasks need, and what workers can do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.domain.model import (
    ANY,
    SetState,
    TaskDemand,
    TaskReport,
    WorkerGroup,
)
from gpuscale.common.errors import InvalidArgumentError


def amounts_from_wire(wire: Mapping[str, int], path: str) -> dict[str, int]:
    """Capabilities by name, sorted.

    Raises:
        InvalidArgumentError: an amount is below -1, or a name would not stand in a list of them.
    """
    for name, amount in wire.items():
        if any(letter in ",=" or letter.isspace() for letter in name):
            text = "must name capabilities without commas, equals signs and spaces"
            raise InvalidArgumentError(f"{path} {text}", field=path)
        if amount < ANY:
            field = f"{path}[{name}]"
            raise InvalidArgumentError(f"{field} must be at least 0, or -1 for any amount", field=field)
    return dict(sorted(wire.items()))


def tasks_from_wire(wire: api.TaskReport, path: str) -> TaskReport:
    """The tasks of a message and the workers beside them, without their age.

    Raises:
        InvalidArgumentError: an amount is below -1.
    """
    return TaskReport(
        tuple(
            TaskDemand(amounts_from_wire(one.capabilities, f"{path}.demands[{i}].capabilities"), one.tasks)
            for i, one in enumerate(wire.demands)
        ),
        groups_from_wire(wire.unmanaged_workers, f"{path}.unmanaged_workers"),
    )


def tasks_to_wire(tasks: TaskReport) -> api.TaskReport:
    """The message of tasks."""
    return api.TaskReport(
        demands=[api.TaskDemand(capabilities=one.capabilities, tasks=one.tasks) for one in tasks.demands],
        unmanaged_workers=[group_to_wire(one) for one in tasks.unmanaged],
    )


def group_from_wire(wire: api.WorkerGroup, path: str) -> WorkerGroup:
    """Workers that can do the same.

    Raises:
        InvalidArgumentError: an amount is below -1.
    """
    return WorkerGroup(amounts_from_wire(wire.capabilities, f"{path}.capabilities"), wire.workers)


def groups_from_wire(wire: Iterable[api.WorkerGroup], path: str) -> tuple[WorkerGroup, ...]:
    """Several groups.

    Raises:
        InvalidArgumentError: an amount is below -1.
    """
    return tuple(group_from_wire(one, f"{path}[{i}]") for i, one in enumerate(wire))


def group_to_wire(group: WorkerGroup) -> api.WorkerGroup:
    """The message of a group."""
    return api.WorkerGroup(capabilities=group.capabilities, workers=group.workers)


def set_state_from_wire(wire: api.DecisionInputs.CapabilitySet) -> SetState:
    """What was known of a capability set."""
    reported = dict(wire.reported.capabilities) if wire.HasField("reported") else None
    return SetState(wire.before, groups_from_wire(wire.groups, "groups"), reported)


def set_state_to_wire(set_id: str, state: SetState) -> api.DecisionInputs.CapabilitySet:
    """The message of what is known of a capability set."""
    return api.DecisionInputs.CapabilitySet(
        id=set_id,
        before=state.before,
        groups=[group_to_wire(one) for one in state.groups],
        reported=None if state.reported is None else api.WorkerGroup(capabilities=state.reported),
    )
