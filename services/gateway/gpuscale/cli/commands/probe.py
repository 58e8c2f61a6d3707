"""`gpuscalectl probe`, and the checks of `run --check`: GPU problems known to the fleet, and a test of free GPUs."""

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gpuscale.cli.commands.gpu_test import BROKEN, NOT_TESTED, UNUSABLE, GpuTest
from gpuscale.cli.console import lookup
from gpuscale.cli.console.cells import word
from gpuscale.cli.console.command import Session, command, names
from gpuscale.cli.console.terminal import TERMINAL, note_of_run
from gpuscale.cli.grammar.nouns import without_noun
from gpuscale.cli.grammar.parameters import option
from gpuscale.common.errors import FailedPreconditionError, GpuscaleError, ResourceExhaustedError

if TYPE_CHECKING:
    from gpuscale.api.allocator.v1 import Reservation
    from gpuscale.api.monitor.v1 import Node
    from gpuscale.api.types.v1 import Gpu
    from gpuscale.client import Client

MOST_NODES = 8
"""Most GPUs tested at a time."""


class Probed(NamedTuple):
    """A finding about a GPU, its severity (OK, UNTESTED, WARN, FAIL), and what to do."""

    gpu: str
    state: str
    found: str
    advice: str = ""


@command("probe host-1 host-2/0")
@names("nodes", metavar="[node|gpu] NAME", required=False)
@option(
    "--user", default="", metavar="NAME", help="Unix user on other hosts; by default as ssh is configured."
)
def probe(session: Session, name: tuple[str, ...], user: str) -> None:
    """Check GPUs, all by default: problems known to the fleet, and a short test of those that are free.

    A test reserves its GPU and runs there as you, like run. A GPU that fails is cordoned with the finding, if you may do so.
    NAME is NODE, NODE/INDEX, NODE/UUID or UUID. Exit code 1 if any finding is FAIL.
    """
    from gpuscale.client.jobs import this_node

    noun, rest = without_noun(name, "nodes", "gpus")
    with session.connect() as client:
        nodes = lookup.nodes(client)
        wanted = {*lookup.spots(lambda: nodes, rest, noun)} or {node.name for node in nodes}
        found = [*_known(client, nodes, wanted)]
        bad = {one.gpu for one in found if one.state == "FAIL"}
        free: dict[str, list[Gpu]] = defaultdict(list)
        for gpu in lookup.gpus(nodes):
            if {gpu.name, gpu.name.partition("/gpus/")[0]} & wanted and _label(gpu) not in bad:
                free[gpu.name.partition("/gpus/")[0]].append(gpu)
        here = this_node(client)

        def test(gpus: "Sequence[Gpu]") -> list[Probed]:
            return [tested(client, gpu, user, here) for gpu in gpus]

        with ThreadPoolExecutor(MOST_NODES) as pool:
            for some in pool.map(test, free.values()):
                found += some
    found.sort(key=lambda one: ("FAIL", "WARN", NOT_TESTED, "OK").index(one.state))
    session.output.write_findings("gpus", [one._asdict() for one in found], ("gpu",))
    if failed := sum(one.state == "FAIL" for one in found):
        raise GpuscaleError(f"{failed} of {len(found)} findings are FAIL", reason="UNWELL")


def expect_well(client: "Client", reservation: "Reservation") -> None:
    """Check that the fleet knows no fatal problem of the granted GPUs; notes all problems.

    Raises FailedPreconditionError: it does; the GPUs are released (GPU_CHECK_FAILED).
    """
    from gpuscale.client.jobs import give_back

    found = [*_known(client, lookup.nodes(client), {gpu.name for gpu in reservation.gpus})]
    for one in found:
        note_of_run(f"{one.gpu} {one.state}: {one.found}")
    if any(one.state == "FAIL" for one in found):
        give_back(client, reservation)
        raise FailedPreconditionError(
            "a GPU failed its check, and nothing was started", reason="GPU_CHECK_FAILED"
        )


def close_failed(client: "Client", name: str) -> None:
    """Report which GPUs of a job failed their test, from the reports of its supervisors, and cordon broken ones."""
    from gpuscale.client.jobs import Job

    found = Job(client, name).look()
    said = "; ".join(one.end_reason for one in found.job.members)
    for gpu in found.gpus:
        for state in (BROKEN, UNUSABLE):
            _, failed, why = said.partition(f"{gpu.uuid} {state}: ")
            why = why.partition("; ")[0]
            if failed:
                done = f"; {_cordon(client, gpu.name, why)}" if state == BROKEN else ""
                note_of_run(f"{gpu.uuid} {state}: {why}{done}")


def _cordon(client: "Client", name: str, why: str) -> str:
    """Cordon a failed GPU, if permitted; returns what was done, or what to do."""
    from gpuscale.api.allocator import v1 as api

    reason = f"it failed its test: {why}"
    try:
        client.nodes.CordonNode(api.CordonNodeRequest(name=name, reason=reason))
    except GpuscaleError as error:
        return f"not cordoned ({error.message}): gpuscalectl cordon {name} --reason '{reason}'"
    return f"cordoned; once it works: gpuscalectl uncordon {name}"


def _label(gpu: "Gpu") -> str:
    return f"{gpu.name.split('/')[1]}/{gpu.uuid if gpu.parent_uuid else gpu.index}"


def _known(client: "Client", nodes: "Sequence[Node]", wanted: set[str]) -> Iterator[Probed]:
    """Problems known to the fleet: states, unresolved health events, and fewer PCIe lanes than others of the model."""
    from gpuscale.client.states import gpu_state

    gpus, events = lookup.gpus(nodes), lookup.health(client)
    lanes: dict[str, int] = defaultdict(int)
    for gpu in gpus:
        lanes[gpu.model] = max(lanes[gpu.model], gpu.reading.pcie_link_width)
    for gpu in gpus:
        node, label, own = gpu.name.partition("/gpus/")[0], _label(gpu), gpu.reading.pcie_link_width
        if not {gpu.name, node} & wanted:
            continue
        for one in events:
            if one.gpu == gpu.name or (one.node == node and not one.gpu):
                advice = word(one, "recommended_action").lower().replace("_", " ")
                yield Probed(label, "FAIL" if one.fatal and not one.cleared else "WARN", one.message, advice)
        if (state := gpu_state(gpu)) in {"LOST", "HUNG", "RESET_REQUIRED", "STALE", "OTHER"}:
            yield Probed(label, "FAIL", f"it is {state}", "gpuscalectl get health")
        if 0 < own < lanes[gpu.model]:
            why = f"its PCIe link has {own} lanes, another {gpu.model} has {lanes[gpu.model]}"
            yield Probed(label, "WARN", why, "reseat it in its slot")


def tested(client: "Client", gpu: "Gpu", user: str, here: str | None) -> Probed:
    """Test a GPU under its own reservation, or say why it was not tested."""
    from gpuscale.client import ReserveOptions, reserve_request
    from gpuscale.client.asks import default_holder
    from gpuscale.client.jobs import supervise
    from gpuscale.client.orders import Orders
    from gpuscale.client.over_ssh import supervised
    from gpuscale.client.states import gpu_state

    label, said = _label(gpu), b""
    if gpu_state(gpu) == "DIVIDED":
        return Probed(label, NOT_TESTED, "not tested: its MIG instances are")
    if gpu.reading.processes:
        return Probed(label, NOT_TESTED, "not tested: processes use it")
    options = ReserveOptions(only_gpus=[gpu.name], mig_profile=gpu.mig_profile, min_memory=0)
    request = reserve_request(1, default_holder(), options)
    request.job.command = "gpuscalectl probe"
    orders = Orders(
        node="", directory="/", address=client.address, authority=client.authority(), user=user, check=True
    )
    with os.fdopen(os.memfd_create("said"), "r+b") as kept, Path(os.devnull).open("wb") as nowhere:
        try:
            granted = client.allocator.Reserve(request)
            [member] = orders.of_grant(granted, here)
            supervise(
                client,
                granted.reservation,
                [supervised(member)],
                stdout=kept.fileno(),
                stderr=nowhere.fileno(),  # the member's report has the error
                once=True,
                environment=TERMINAL.callers_environment(),
            )
        except GpuscaleError as error:
            why = "it is not free" if isinstance(error, ResourceExhaustedError) else error.message
            return Probed(label, NOT_TESTED, f"not tested: {why}")
        kept.seek(0)
        said = kept.read()
    found = GpuTest(*json.loads(said)[gpu.uuid]) if said else GpuTest(UNUSABLE, "its supervisor said nothing")
    if found.state == NOT_TESTED:
        return Probed(label, NOT_TESTED, f"not tested: {found.found}")
    advice = _cordon(client, gpu.name, found.found) if found.state == BROKEN else ""
    return Probed(label, "FAIL" if found.state in (BROKEN, UNUSABLE) else found.state, found.found, advice)
