"""The catalogue of bad inputs (research: reliability and security, chapter 5), its rows from Reserve to Drain, one by one.

Each is answered with the status that is listed there, names the field or the reason, and leaves everything as it was.
Where the contract departs from the catalogue the row says so. Rows for any RPC, and for a field alone against its own rule, are those
of test_every_rpc.py (15, 16, 19, 21, 28, 34, parts of 30 and 33) and tests/unit/common/test_validation.py (27); row 31 (another's
lease) needs two callers, 58 a GPU that is not there, 59 a full disk: tests/integration/allocator/test_lifecycle.py, test_cordons.py
and test_disk.py.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import NamedTuple
from uuid import UUID

import pytest

from gpuscale.api.allocator import v1 as api
from gpuscale.common.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    GpuscaleError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
)
from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.rpc.status import rpc_errors
from tests.support.allocator import Client, Reservation, allocator, calling
from tests.support.fake_fleet import FakeFleet, GpuState, NodeState, gpu_message, node_message, serving

USED = str(UUID(int=1, version=4))
"""The request id of the one reservation that there is."""
UNKNOWN = Reservation(name="reservations/r99-ffff", fence=99)
Call = Callable[[Client, Reservation], Awaitable[object]]


class Row(NamedTuple):
    """A case: its number in the catalogue, what is sent, and what comes back: the error, and its reason or field."""

    number: int
    what: str
    call: Call
    error: type[GpuscaleError]
    says: str


def reserve(number: int, what: str, error: type[GpuscaleError], says: str, **fields: object) -> Row:
    """A case of Reserve."""
    return Row(number, what, lambda client, _: client.reserve(**fields), error, says)


def bad(number: int, field: str, **fields: object) -> Row:
    """A case of Reserve that is INVALID_ARGUMENT and names a field."""
    return reserve(
        number, f"{field} {str(list(fields.values()))[:40]}", InvalidArgumentError, field, **fields
    )


async def empty_ask(client: Client, _: Reservation) -> object:
    """Reserve without saying what."""
    with rpc_errors():
        return await client.stub.Reserve(api.ReserveRequest(request_id=USED, holder="me"), timeout=60)


ROWS = (
    # Row 12 wants INVALID_ARGUMENT or OUT_OF_RANGE; the fleet may grow, so it is a precondition (DESIGN, chapter 10).
    reserve(12, "more than there are", FailedPreconditionError, "UNSATISFIABLE", count=9),
    reserve(14, "what is taken", ResourceExhaustedError, "NO_CAPACITY", count=4),
    reserve(17, "more memory than any GPU has", FailedPreconditionError, "UNSATISFIABLE", memory=10_000_000),
    reserve(17, "a share of 8 EiB", FailedPreconditionError, "UNSATISFIABLE", gpu_memory_bytes=2**63 - 1),
    reserve(20, "the id of another", AlreadyExistsError, "REQUEST_ID_REUSED", request_id=USED, count=2),
    reserve(22, "an unknown node", NotFoundError, "NOT_FOUND", nodes=["nodes/none"]),
    reserve(22, "an unknown GPU", NotFoundError, "NOT_FOUND", gpus=["nodes/n0/gpus/none"]),
    bad(22, "ask.models", models=[""]),  # as of a variable that is not set: it would be part of any name
    bad(22, "ask.models", models=["A100", " "]),
    bad(22, "ask.gpus", gpus=["nodes/n0/gpus/N0-0"]),
    bad(23, "ask.gpus", gpus=["nodes/n0/gpus/n0-0", "nodes/n0/gpus/n0-0"]),
    bad(24, "ask.gpu_memory_bytes", gpu_milli=1000, gpu_memory_bytes=1 << 30),
    Row(25, "nothing asked", empty_ask, InvalidArgumentError, "ask"),
    reserve(26, "a silent node", FailedPreconditionError, "NODE_NOT_ONLINE", nodes=["nodes/silent"]),
    # Row 26 wants FAILED_PRECONDITION here too; but a cordon and a quarantine are lifted, and a wait may help.
    reserve(26, "a cordoned node", ResourceExhaustedError, "NO_CAPACITY", nodes=["nodes/shut"]),
    reserve(26, "a hung GPU", ResourceExhaustedError, "NO_CAPACITY", nodes=["nodes/hung"]),
    Row(30, "Renew with a higher fence", lambda c, one: c.renew(one, fence=one.fence + 1), FailedPreconditionError, "FENCE_MISMATCH"),
    Row(33, "Release with a wrong fence", lambda c, one: c.release(one, fence=one.fence + 1), FailedPreconditionError, "FENCE_MISMATCH"),
)  # fmt: skip


class Site(NamedTuple):
    """An allocator with one reservation; and who cordons."""

    client: Client
    held: Reservation
    address: str


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Site]:
    fleet = FakeFleet(
        node_message("n0", count=4),
        node_message("silent", count=1, state=NodeState.NODE_STATE_OFFLINE),
        node_message("shut", count=1),
        node_message("hung", gpu_message("hung-0", state=GpuState.GPU_STATE_HUNG)),
    )
    async with (
        serving(fleet) as fleet_address,
        allocator(tmp_path, fleet_address) as address,
        calling(address) as client,
    ):
        await client.ready()
        await drained(address, "nodes/shut")
        held = await client.reserve(request_id=USED, ttl=3600, nodes=["nodes/n0"])
        yield Site(client, held, address)


async def drained(address: str, name: str) -> api.DrainNodeResponse:
    """Drain a node."""
    async with open_channel(address) as channel:
        with rpc_errors():
            return await api.NodeServiceStub(channel).DrainNode(api.DrainNodeRequest(name=name), timeout=60)


async def test_every_row_is_answered_as_listed_and_changes_nothing(place: Site) -> None:
    before = await place.client.page(show_ended=True)
    wrong: list[str] = []
    for row in ROWS:
        try:
            await row.call(place.client, place.held)
        except GpuscaleError as error:
            fields = (
                [one.field for one in error.violations] if isinstance(error, InvalidArgumentError) else []
            )
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
    first = await drained(place.address, "nodes/shut")
    again = await drained(place.address, "nodes/shut")
    assert again.cordon.create_time == first.cordon.create_time
    for _ in range(2):
        assert (await place.client.release(place.held)).state == Reservation.STATE_RELEASED
    with pytest.raises(FailedPreconditionError) as ended:  # row 29
        await place.client.renew(place.held)
    assert ended.value.reason == "RESERVATION_ENDED"
