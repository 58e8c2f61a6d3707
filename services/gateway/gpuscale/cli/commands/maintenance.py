"""`gpuscalectl cordon`, `uncordon`, `drain`, `clear`, `driver` and `forget`: take nodes and GPUs out of use, and back."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.cli.console import cells, lookup
from gpuscale.cli.console.bulk import Done, confirm, say_each
from gpuscale.cli.console.command import Session, command, names
from gpuscale.cli.console.output import to_dict
from gpuscale.cli.grammar.nouns import full_name, without_noun
from gpuscale.cli.grammar.parameters import DURATION, YES, local_text, option
from gpuscale.common import wire
from gpuscale.common.names import ADAPTER, NODE

if TYPE_CHECKING:
    from gpuscale.client import Client

SPOTS = names("nodes", metavar="[node|gpu] NAME")
REASON = option("--reason", default="", help="Why, for others to read.")


@command("cordon host-1 --reason 'a fan is broken'")
@SPOTS
@REASON
def cordon(session: Session, name: tuple[str, ...], reason: str) -> None:
    """Close nodes or GPUs to new work; running work stays. NAME is NODE, NODE/INDEX, NODE/UUID or UUID."""

    def put(client: "Client", full: str) -> Done:
        found = client.nodes.CordonNode(allocator_api.CordonNodeRequest(name=full, reason=reason)).cordon
        return Done(full, f"{full} cordoned", to_dict(found))

    def check(client: "Client", full: str) -> None:
        client.nodes.CordonNode(allocator_api.CordonNodeRequest(name=full, validate_only=True))

    say_each(session, "cordons", _spots(session, name), put, check)


@command("uncordon host-1 host-2")
@SPOTS
def uncordon(session: Session, name: tuple[str, ...]) -> None:
    """Open nodes or GPUs to new work again, and end drains. NAME is NODE, NODE/INDEX, NODE/UUID or UUID."""

    def lift(client: "Client", full: str) -> Done:
        client.nodes.UncordonNode(allocator_api.UncordonNodeRequest(name=full))
        return Done(full, f"{full} uncordoned", {"name": full})

    def check(client: "Client", full: str) -> None:
        client.nodes.UncordonNode(allocator_api.UncordonNodeRequest(name=full, validate_only=True))

    say_each(session, "cordons", _spots(session, name), lift, check)


@command("drain host-1 --grace 5m")
@SPOTS
@option("--grace", type=DURATION, help="How long holders have to leave; 10m by default.")
@REASON
def drain(session: Session, name: tuple[str, ...], grace: float | None, reason: str) -> None:
    """Cordon nodes or GPUs, ask the holders there to leave, and revoke the remaining reservations at the deadline.

    NAME is NODE, NODE/INDEX, NODE/UUID or UUID.
    """

    def empty(client: "Client", full: str) -> Done:
        wait = None if grace is None else wire.to_duration(grace)
        found = client.nodes.DrainNode(allocator_api.DrainNodeRequest(name=full, reason=reason, grace=wait))
        leaving = ", ".join(f"{cells.short(one.name)} of {one.holder}" for one in found.reservations)
        return Done(full, f"{full} is draining; to leave: {leaving or 'nobody'}", to_dict(found.cordon))

    def check(client: "Client", full: str) -> None:
        client.nodes.DrainNode(allocator_api.DrainNodeRequest(name=full, validate_only=True))

    say_each(session, "cordons", _spots(session, name), empty, check)


@command("clear quarantine host-1/0")
@names("gpus", metavar="GPU")
def clear_quarantine(session: Session, name: tuple[str, ...]) -> None:
    """Allow work on quarantined GPUs again, until the next fault. GPU is NODE/INDEX, NODE/UUID or UUID."""

    def clear(client: "Client", full: str) -> Done:
        found = client.health.ClearQuarantine(monitor_api.ClearQuarantineRequest(name=full)).health_events
        line = f"{full} is out of quarantine" if found else f"{full} was not quarantined"
        return Done(full, line, {"name": full, "healthEvents": [to_dict(event) for event in found]})

    say_each(session, "gpus", _spots(session, ("gpus", *name)), clear)


@command("clear fence GPU-8f3c --address host-1:7071")
@names("gpus", metavar="UUID")
def clear_fence(session: Session, name: tuple[str, ...]) -> None:
    """Make the agent at --address forget the fences of GPUs, and what was admitted on them. Needs role admin.

    Use it after the allocator has lost its state and restarted with lower fences, which the agent rejects as those of former
    holders.
    """

    def reset(client: "Client", uuid: str) -> Done:
        client.work.ResetFences(monitor_api.ResetFencesRequest(gpu_uuids=[uuid]))
        return Done(uuid, f"{uuid} has no fence now", {"name": uuid})

    say_each(session, "gpus", name, reset)


@command("--address host-1:7071 driver release --reason 'reset GPU 3' --for 10m")
@option("--reason", required=True, help="Why, for others to read.")
@option("--for", "longest", type=DURATION, default="10m", help="For how long, at most 1h.")
def driver_release(session: Session, reason: str, longest: float) -> None:
    """Make the agent at --address close the GPU driver, so that GPUs can be reset or the driver updated."""
    request = monitor_api.ReleaseDriverRequest(max_duration=wire.to_duration(longest), reason=reason)
    with session.connect() as client:
        answer = client.driver.ReleaseDriver(request)
    until = local_text(wire.to_datetime(answer.resume_time))
    session.output.write_said(
        f"driver released until {until}; to resume now: gpuscalectl driver resume", to_dict(answer)
    )


@command("--address host-1:7071 driver resume")
def driver_resume(session: Session) -> None:
    """Let the agent at --address reopen the GPU driver early."""
    with session.connect() as client:
        answer = client.driver.ResumeDriver(monitor_api.ResumeDriverRequest())
    session.output.write_said(
        "driver resumed" if answer.was_released else "the driver was not released", to_dict(answer)
    )


@command("forget adapter process-1")
@names("adapters")
@YES
def forget_adapter(session: Session, name: tuple[str, ...], yes: bool) -> None:
    """Forget adapters whose host is gone: their replicas end as FAILED, and their GPUs are released.

    Only do this if nothing runs on the host any more: running workers cannot be stopped, and would share GPUs with others.
    """

    def forget(client: "Client", full: str) -> Done:
        lost = client.adapters.ForgetAdapter(autoscaler_api.ForgetAdapterRequest(name=full)).replicas
        line = f"{full} is forgotten; replicas that ended with it: {', '.join(lost) or 'none'}"
        return Done(full, line, {"name": full, "replicas": list(lost)})

    wanted = [full_name(ADAPTER, one) for one in name]
    danger = "Processes still running on the host will share its GPUs with the next holder."
    confirm("Forget", ", ".join(wanted), yes=yes, danger=danger)
    say_each(session, "adapters", wanted, forget)


@command("forget node host-9")
@names("nodes")
def forget_node(session: Session, name: tuple[str, ...]) -> None:
    """Forget OFFLINE nodes and their health events; a node comes back when its agent reports again."""

    def forget(client: "Client", full: str) -> Done:
        client.fleet.ForgetNode(monitor_api.ForgetNodeRequest(name=full))
        return Done(full, f"{full} is forgotten", {"name": full})

    def check(client: "Client", full: str) -> None:
        client.fleet.GetNode(monitor_api.GetNodeRequest(name=full))

    say_each(session, "nodes", [full_name(NODE, one) for one in name], forget, check)


def _spots(session: Session, typed: Sequence[str]) -> list[str]:
    """The resource names of nodes and GPUs, with or without a noun in front."""
    noun, rest = without_noun(typed, "nodes", "gpus")

    def nodes() -> "list[monitor_api.Node]":
        with session.connect() as client:
            return lookup.nodes(client)

    return lookup.spots(nodes, rest, noun)
