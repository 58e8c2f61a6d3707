"""The language of `filter` and `order_by`, on reservations and quotas."""

import asyncio
import json
from datetime import UTC, datetime

import pytest

from gpuscale.api.allocator import v1 as api
from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.common import filters, wire
from gpuscale.common.errors import InvalidArgumentError
from gpuscale.common.filters import compile_filter, compile_order, listed, required_texts

HELD = api.Reservation(
    name="reservations/a",
    holder='a "b" train*',
    state=api.Reservation.STATE_ACTIVE,
    fence=7,
    gpus=[api.ReservedGpu(node="alpha", milli=500), api.ReservedGpu(node="beta", milli=1000, lost=True)],
    ttl=wire.to_duration(90),
    create_time=wire.to_timestamp(datetime(2026, 3, 1, 12, 30, tzinfo=UTC)),
    labels={"team": "vision", "a.b/c": "", "app-name": "x"},
    usage=api.ReservationUsage(idle=False),
)
TEXTS = {
    "name": {HELD.name}, "holder": {HELD.holder}, "gpus.node": {one.node for one in HELD.gpus},
    "labels": {*HELD.labels}, **{f"labels.{key}": {value} for key, value in HELD.labels.items()},
}  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "", "  ", 'name = "reservations/a"', "name = reservations/a", "name = reservations/*", "name=*/a",
        "name = *serv*", r'holder = "a \"b\" train\*"', "holder != a", "holder:train", "holder:*",
        "NOT tenant:*", "holder > A AND holder < b", "state = ACTIVE", "state = active",
        "state = STATE_ACTIVE", "state != STATE_LOST",
        "fence >= 7 AND fence <= 7.0 AND fence > -1 AND NOT fence > 7", "gpus.node:alpha", "gpus.node:be*",
        "gpus.milli:500", "gpus.lost:true", "gpus:*", "ttl = 90s", "ttl >= 1m30s AND ttl < 2m",
        'create_time = "2026-03-01T12:30:00Z"', "create_time > 2026-03-01T13:29:59+01:00",
        "createTime < 2026-03-01T12:30:00.000000001Z", "create_time:* AND NOT end_time:*",
        "NOT end_time < 2030-01-01T00:00:00Z", "end_time != 2030-01-01T00:00:00Z", "labels:team",
        "labels.team = vision", "labels.team:sio", 'labels."a.b/c":*', "labels.app-name = x",
        "NOT labels.other:* AND labels.other != x", "usage.idle = false",
        "usage.idle:* AND NOT usage.overused:*", "preemptible = false AND NOT preemptible:*",
        "NOT (fence = 1 OR fence = 2) AND (fence = 7)",
        "fence = 1 OR fence = 7 AND state = ACTIVE OR state = LOST",
        "NOT (fence = 7 AND fence = 1 OR fence = 2)",
    ],
)  # fmt: skip
def test_a_reservation_meets(text: str) -> None:
    assert compile_filter(text, api.Reservation)(HELD)
    for path, value in required_texts(text, api.Reservation).items():
        assert value in TEXTS[path]


def test_what_a_filter_requires_is_told_for_an_index() -> None:
    text = 'holder = "a b" AND (fence = 1 OR name = n) AND gpus.node:n1 AND tenant != t AND gpus.uuid:G* AND NOT name = n'
    assert required_texts(text, api.Reservation) == {"holder": "a b", "gpus.node": "n1"}
    assert not required_texts("tenant = t OR holder = a OR holder = b", api.Reservation)


@pytest.mark.parametrize(
    "text",
    [
        "holder = train", 'holder = "a*\\*x"', "holder:nothing", "tenant:*", "state = LOST",
        "gpus.node:alph", "gpus.node:gamma", "NOT gpus:*", "labels:vision", "labels.other:*",
        "labels.other = *", "usage.overused = false", "end_time < 2030-01-01T00:00:00Z",
        "fence = 7 AND fence = 1 OR fence = 2",
    ],
)  # fmt: skip
def test_a_reservation_does_not_meet(text: str) -> None:
    assert not compile_filter(text, api.Reservation)(HELD)


@pytest.mark.parametrize(
    ("text", "at", "what"),
    [
        ("colour = 3", 1, "Reservation has no field 'colour'"),
        ("fence = 7 AND gpus.colour:3", 20, "ReservedGpu has no field 'colour'"),
        ("holder", 7, "expected one of"), ("holder =", 9, "expected a value"),
        ("holder = a b", 12, "expected AND, OR or the end"), ("(holder = a", 12, "expected AND, OR or )"),
        ("holder = a)", 11, "expected AND, OR or the end"),
        ("holder.x = a", 8, "there are no fields here"), ("= a", 1, "expected a field"),
        ("fence = x", 9, "expected a number"), ("fence = 1e999", 9, "expected a number"),
        ("state = MOLTEN", 9, "expected PENDING or ACTIVE or RELEASED"), ("state > ACTIVE", 9, "asked with = or !="),
        ("preemptible = 1", 15, "expected true or false"), ("ttl > ever", 7, "expected a duration"),
        ("create_time > today", 15, "expected a time"), ("gpus = a", 8, "asked with :"),
        ("gpus.node = a", 13, "asked with :"), ("gpus:a", 6, "one of its fields"),
        ("usage = a", 9, "one of its fields"),
        pytest.param("(" * 40 + "fence = 1" + ")" * 40, 34, "nested too deeply", id="brackets"),
        pytest.param("NOT " * 400 + "fence = 1", 133, "nested too deeply", id="negations"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_with_its_place(text: str, at: int, what: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        compile_filter(text, api.Reservation)
    assert caught.value.message.startswith(f"filter, at character {at}: "), caught.value.message
    assert what in caught.value.message
    assert [one.field for one in caught.value.violations] == ["filter"]


def test_of_many_values_the_nearest_are_named() -> None:
    with pytest.raises(InvalidArgumentError, match="expected a value such as NO_ADAPTER or ") as caught:
        compile_filter("limited_by = no_adaptr", autoscaler_api.Decision)
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    ("text", "at"), [("colour", 1), ("holder up", 8), ("gpus", 1), ("holder,", 8), ("usage", 1)]
)
def test_an_order_that_cannot_be_read_is_refused_with_its_place(text: str, at: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^order_by, at character {at}: "):
        compile_order(text, api.Reservation)


QUOTAS = [
    api.Quota(tenant="a", weight=2, gpu_milli_held=3),
    api.Quota(tenant="b", gpu_milli_held=3),
    api.Quota(tenant="c", weight=float("nan"), gpu_milli_held=1),
    api.Quota(tenant="d", weight=1, gpu_milli_held=2),
]


@pytest.mark.parametrize(
    ("order", "tenants"),
    [
        ("", "abcd"),
        ("tenant desc", "dcba"),
        ("weight", "bcda"),
        ("weight desc", "adbc"),
        ("gpu_milli_held desc, weight asc", "badc"),
    ],
)
def test_pages_follow_the_order_and_the_filter(order: str, tenants: str) -> None:
    for wanted, descending in (("", False), ("tenant != c", False), ("", not order)):
        seen, token = "", ""
        while True:
            request = api.ListQuotasRequest(page_size=1, page_token=token, filter=wanted, order_by=order)
            found, token = listed(
                QUOTAS[::-1] if descending else QUOTAS,
                request,
                api.Quota,
                key=lambda one: one.tenant,
                encode=lambda one: one,
                descending=descending,
            )
            seen += "".join(one.tenant for one in found)
            if not token:
                break
        expected = tenants[::-1] if descending else tenants
        assert seen == (expected.replace("c", "") if wanted else expected)


def test_only_what_is_on_the_page_is_made_a_message() -> None:
    made: list[str] = []

    def encode(quota: api.Quota) -> api.Quota:
        made.append(quota.tenant)
        return quota

    request = api.ListQuotasRequest(page_size=1)
    _, request.page_token = listed(QUOTAS, request, api.Quota, key=lambda one: one.tenant, encode=encode)
    listed(QUOTAS, request, api.Quota, key=lambda one: one.tenant, encode=encode)
    assert made == ["a", "b", "b", "c"]


def test_a_page_costs_what_is_on_it_and_not_what_comes_before() -> None:
    looked_at: list[int] = []

    def key(number: int) -> str:
        looked_at.append(number)
        return f"{number:06}"

    def encode(number: int) -> api.Quota:
        return api.Quota(tenant=str(number))

    costs = list[int]()
    for count in (100, 10_000):
        last = wire.to_token(json.dumps([[f"{count // 2:06}", False]]))
        request = api.ListQuotasRequest(page_size=10, page_token=last)
        looked_at.clear()
        found, _ = listed(range(count), request, api.Quota, key=key, encode=encode)
        assert [one.tenant for one in found] == [str(count // 2 + 1 + at) for at in range(10)]
        costs.append(len(looked_at))
    assert costs[1] - costs[0] <= 7, "a hundred times as many: seven halves more"
    assert costs[0] <= 11 + 7


async def test_other_tasks_run_while_a_list_is_sorted() -> None:
    turns = list[int]()

    async def beside() -> None:
        while True:
            turns.append(1)
            await asyncio.sleep(0)

    task = asyncio.create_task(beside())
    request = api.ListQuotasRequest(page_size=2, order_by="tenant desc")
    found, _ = await filters.listed_in_turns(
        [f"{number:04}" for number in range(1000)],
        request,
        api.Quota,
        key=str,
        encode=lambda one: api.Quota(tenant=one),
    )
    task.cancel()
    assert [one.tenant for one in found] == ["0999", "0998"]
    assert len(turns) == 1000 // filters.AT_ONCE


@pytest.mark.parametrize("last", ["x", "7", "[7]", "[[7, false]]", "[[null, 1], 2]"])
def test_a_forged_token_is_refused(last: str) -> None:
    request = api.ListQuotasRequest(page_token=wire.to_token(last))
    with pytest.raises(InvalidArgumentError, match="page_token"):
        listed(QUOTAS, request, api.Quota, key=lambda one: one.tenant, encode=lambda one: one)
