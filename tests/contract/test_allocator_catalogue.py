"""The catalogue of bad inputs (research: reliability and security, chapter 5), its rows from Reserve to Drain, one by one.

Each is answered with the status that is listed there, names the field or the reason, and leaves everything as it was.
Where the contract departs from the catalogue the row says so. test_every_rpc.py takes the limits of fields from the annotations that
the services enforce, so what the comments promise is written down here once more; rows for any RPC are there alone (16, 28). Row 31
(another's lease) needs two callers, 58 a GPU that is not there, 59 a full disk: tests/integration/allocator/test_lifecycle.py,
test_cordons.py and test_disk.py.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID, uuid4

import pytest

from gpuscale.api.allocator import v1 as api
from gpuscale.common import errors
from gpuscale.common.rpc.status import rpc_errors
from tests.support.allocator import Client, Reservation, running
from tests.support.fake_fleet import FakeFleet, GpuState, NodeState, gpu_message, node_message

USED = str(UUID(int=1, version=4))
"""The request id of the one reservation that there is."""
UNKNOWN = Reservation(name="reservations/r99-ffff", fence=99)
Call = Callable[[Client, Reservation], Awaitable[object]]


class Row(NamedTuple):
    """A case: its number in the catalogue, what is sent, and what comes back: the error, and its reason or field."""

    number: int
    what: str
    call: Call
    error: type[errors.GpuscaleError]
    says: str


def reserve(number: int, what: str, error: type[errors.GpuscaleError], says: str, **fields: object) -> Row:
    return Row(number, what, lambda client, _: client.reserve(**fields), error, says)


def bad(number: int, field: str, **fields: object) -> Row:
    """A case of Reserve that is INVALID_ARGUMENT and names a field."""
    return reserve(
        number, f"{field} {str(list(fields.values()))[:40]}", errors.InvalidArgumentError, field, **fields
    )


async def empty_ask(client: Client, _: Reservation) -> object:
    with rpc_errors():
        return await client.stub.Reserve(api.ReserveRequest(request_id=USED, holder="me"), timeout=60)


MANY, TWICE = {str(index): "" for index in range(65)}, ["nodes/n0", "nodes/n0"]
LIMITS: Mapping[str, tuple[object, ...]] = {
    "request_id": ("", "1"),  # row 19
    "holder": ("", "a\u202eb"),  # row 21
    "ttl": (timedelta(seconds=1.999), timedelta(days=7, seconds=1)),  # row 15, which says 5 s
    "labels": (MANY, {"": "x"}),  # row 27
    "wait": (timedelta(seconds=-1), timedelta(days=7, seconds=1)),
    "tenant": ("a\u202eb",),
    "priority": (-1001, 1001),
    "owner": ("a\u202eb",),
    "time_limit": (timedelta(seconds=0.999), timedelta(days=365, seconds=1)),
    "booking": ("b1",),
    "ask.gpu_count": (0, 4097),
    "ask.min_memory_bytes": (-1,),
    "ask.max_utilization_percent": (0, 100.1),
    "ask.gpu_milli": (0, 1001),
    "ask.gpu_memory_bytes": (0,),
    "ask.mig_profile": ("x" * 65,),
    "ask.models": (["A100"] * 2, [*MANY][:33]),
    "ask.cpu_milli": (-1, 10_000_001),
    "ask.host_memory_bytes": (-1,),
    "ask.nodes": (TWICE, ["n0"]),
    "ask.excluded_nodes": (TWICE, ["n0"]),
    "ask.gpus": (["gpus/a"],),
    "ask.excluded_gpus": (["nodes/n0/gpus/a"] * 2, ["gpus/a"]),
    "ask.node_labels": (MANY, {"": "x"}),
    "ask.apart_from": (MANY, {"": "x"}),
    "ask.gpu_set": (9,),
    "ask.member_count": (0, 1001),
    "ask.weights": ({"memory": -1}, {"memory": 1001}, {"utilization": -1}, {"utilization": 1001}),
    "ask.power_limit_watts": (0, 100_001),
}
"""What a field of Reserve may not be; rows without another number are not in the catalogue."""


def beyond(field: str, value: object) -> Row:
    """A case of Reserve with one value that its field may not have."""

    async def call(client: Client, _: Reservation) -> object:
        ask: dict[str, Any] = {"gpu_count": 1}
        fields = {"request_id": str(uuid4()), "holder": "me", "ask": ask}
        (ask if field.startswith("ask.") else fields)[field.removeprefix("ask.")] = value
        with rpc_errors():
            return await client.stub.Reserve(api.ReserveRequest(**fields), timeout=60)

    return Row(0, f"{field} {str(value)[:40]}", call, errors.InvalidArgumentError, field)


ROWS = (
    *(beyond(field, value) for field, values in LIMITS.items() for value in values),
    # Row 12 wants INVALID_ARGUMENT or OUT_OF_RANGE; the fleet may grow, so it is a precondition (DESIGN, chapter 10).
    reserve(12, "more than there are", errors.FailedPreconditionError, "UNSATISFIABLE", count=9),
    reserve(14, "what is taken", errors.ResourceExhaustedError, "NO_CAPACITY", count=4),
    reserve(17, "more memory than any GPU has", errors.FailedPreconditionError, "UNSATISFIABLE", memory=10_000_000),
    reserve(17, "a share of 8 EiB", errors.FailedPreconditionError, "UNSATISFIABLE", gpu_memory_bytes=2**63 - 1),
    reserve(20, "the id of another", errors.AlreadyExistsError, "REQUEST_ID_REUSED", request_id=USED, count=2),
    reserve(22, "an unknown node", errors.NotFoundError, "NOT_FOUND", nodes=["nodes/none"]),
    reserve(22, "an unknown GPU", errors.NotFoundError, "NOT_FOUND", gpus=["nodes/n0/gpus/none"]),
    bad(22, "ask.models", models=[""]),  # as of a variable that is not set: it would be part of any name
    bad(22, "ask.models", models=["A100", " "]),
    bad(22, "ask.gpus", gpus=["nodes/n0/gpus/N0-0"]),
    bad(23, "ask.gpus", gpus=["nodes/n0/gpus/n0-0", "nodes/n0/gpus/n0-0"]),
    bad(24, "ask.gpu_memory_bytes", gpu_milli=1000, gpu_memory_bytes=1 << 30),
    bad(0, "ask.gpus[0]", gpus=["nodes/n0/gpus/a"], excluded_gpus=["nodes/n0/gpus/a"]),
    bad(0, "ask.gpus[0]", gpus=["nodes/n0/gpus/a"], excluded_nodes=["nodes/n0"]),
    bad(0, "ask.gpus[0]", gpus=["nodes/n0/gpus/a"], nodes=["nodes/n1"]),
    bad(0, "ask.nodes[0]", nodes=["nodes/n0"], excluded_nodes=["nodes/n0"]),
    bad(0, "may_preempt", may_preempt=True),
    Row(25, "nothing asked", empty_ask, errors.InvalidArgumentError, "ask"),
    reserve(26, "a silent node", errors.FailedPreconditionError, "NODE_NOT_ONLINE", nodes=["nodes/silent"]),
    # Row 26 wants FAILED_PRECONDITION here too; but a cordon and a quarantine are lifted, and a wait may help.
    reserve(26, "a cordoned node", errors.ResourceExhaustedError, "NO_CAPACITY", nodes=["nodes/shut"]),
    reserve(26, "a hung GPU", errors.ResourceExhaustedError, "NO_CAPACITY", nodes=["nodes/hung"]),
    Row(30, "Renew with a higher fence", lambda c, one: c.renew(one, fence=one.fence + 1), errors.FailedPreconditionError, "FENCE_MISMATCH"),
    # Rows 30 and 33 want FAILED_PRECONDITION: a fence below 0 breaks a rule of the contract before it is compared.
    Row(30, "Renew with a negative fence", lambda c, one: c.renew(one, fence=-1), errors.InvalidArgumentError, "fence"),
    Row(30, "Renew with too short a lease", lambda c, one: c.renew(one, ttl=1.999), errors.InvalidArgumentError, "ttl"),
    Row(30, "Renew with too long a lease", lambda c, one: c.renew(one, ttl=604_801), errors.InvalidArgumentError, "ttl"),
    Row(33, "Release with a wrong fence", lambda c, one: c.release(one, fence=one.fence + 1), errors.FailedPreconditionError, "FENCE_MISMATCH"),
    Row(33, "Release with a negative fence", lambda c, one: c.release(one, fence=-1), errors.InvalidArgumentError, "fence"),
    Row(34, "a negative page", lambda c, _: c.page(page_size=-1), errors.InvalidArgumentError, "page_size"),
)  # fmt: skip


class Site(NamedTuple):
    """An allocator with one reservation."""

    client: Client
    held: Reservation


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Site]:
    fleet = FakeFleet(
        node_message("n0", count=4),
        node_message("silent", count=1, state=NodeState.NODE_STATE_OFFLINE),
        node_message("shut", count=1),
        node_message("hung", gpu_message("hung-0", state=GpuState.GPU_STATE_HUNG)),
    )
    async with running(tmp_path, fleet) as client:
        await drained(client, "nodes/shut")
        held = await client.reserve(request_id=USED, ttl=3600, nodes=["nodes/n0"])
        yield Site(client, held)


async def drained(client: Client, name: str) -> api.DrainNodeResponse:
    return await api.NodeServiceStub(client.channel).DrainNode(api.DrainNodeRequest(name=name), timeout=60)


async def test_every_row_is_answered_as_listed_and_changes_nothing(place: Site) -> None:
    before = await place.client.page(show_ended=True)
    wrong: list[str] = []
    for row in ROWS:
        try:
            await row.call(place.client, place.held)
        except errors.GpuscaleError as error:
            invalid = isinstance(error, errors.InvalidArgumentError)
            fields = [one.field for one in error.violations] if invalid else []
            named = any(one == row.says or one.startswith((f"{row.says}.", f"{row.says}[")) for one in fields)
            if type(error) is not row.error or not (named or error.reason == row.says):
                wrong.append(f"{row.number} {row.what}: {type(error).__name__} {error.reason} {fields}")
            if row.number == 14 and error.retry_after is None:
                wrong.append("14: without the time after which to try again")
        else:
            wrong.append(f"{row.number} {row.what}: OK")
    after = await place.client.page(show_ended=True)
    assert wrong == []
    assert [(one.name, one.state, one.ttl) for one in after.reservations] == [
        (one.name, one.state, one.ttl) for one in before.reservations
    ]


async def test_rows_that_are_no_error(place: Site) -> None:
    """A large page is cut (AIP-158), a second Release is harmless, and so is a second Drain."""
    assert len((await place.client.page(page_size=10**9)).reservations) == 1
    first = await drained(place.client, "nodes/shut")
    again = await drained(place.client, "nodes/shut")
    assert again.cordon.create_time == first.cordon.create_time
    for _ in range(2):
        assert (await place.client.release(place.held)).state == Reservation.STATE_RELEASED
    with pytest.raises(errors.FailedPreconditionError) as ended:  # row 29
        await place.client.renew(place.held)
    assert ended.value.reason == "RESERVATION_ENDED"
