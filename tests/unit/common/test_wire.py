"""Wire values, pages of lists, clock and back-off."""

import base64
import time
from datetime import UTC, datetime, timedelta, timezone

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.struct_pb2 import Struct

from gpuscale.api.allocator import v1 as api
from gpuscale.api.types import v1 as types_api
from gpuscale.common import wire
from gpuscale.common.errors import InvalidArgumentError
from gpuscale.common.filters import listed
from gpuscale.common.runtime.tasks import Backoff, Clock, SystemClock


def test_system_clock_counts_seconds_since_boot() -> None:
    clock: Clock = SystemClock()
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert before <= clock.now() <= time.clock_gettime(time.CLOCK_BOOTTIME)
    assert len(clock.boot_id) == 36
    assert clock.boot_id == SystemClock().boot_id
    assert clock.wall().tzinfo is UTC


def test_optional_seconds_tells_absent_from_zero() -> None:
    snapshot = types_api.Snapshot()
    assert wire.optional_seconds(snapshot, "age") is None
    snapshot.age.CopyFrom(Duration())
    assert wire.optional_seconds(snapshot, "age") == 0.0
    snapshot.host.hostname = "a"
    with pytest.raises(TypeError):
        wire.optional_seconds(snapshot, "host")


def test_timestamps_keep_the_instant_and_need_a_zone() -> None:
    date = datetime(2026, 3, 1, 12, 30, tzinfo=timezone(timedelta(hours=2)))
    assert wire.to_datetime(wire.to_timestamp(date)) == date
    assert wire.to_datetime(wire.to_timestamp(date)).tzinfo is UTC
    with pytest.raises(ValueError):
        wire.to_timestamp(datetime(2026, 3, 1))  # noqa: DTZ001


def test_fingerprint_tells_content_and_type_apart_but_not_the_order_of_a_map() -> None:
    one, other = Struct(), Struct()
    one.update({"a": 1, "b": 2})
    other.update({"b": 2, "a": 1})
    assert wire.fingerprint(one) == wire.fingerprint(other)
    other["a"] = 3
    assert wire.fingerprint(one) != wire.fingerprint(other)
    assert wire.fingerprint(Struct()) != wire.fingerprint(Duration())


def test_backoff_stays_below_a_ceiling_that_doubles_up_to_the_cap() -> None:
    ceilings = [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]
    rounds: list[list[float]] = []
    backoff = Backoff(initial=0.5, cap=5.0)
    for _ in range(300):
        rounds.append([backoff.next() for _ in ceilings])
        backoff.reset()
    for ceiling, waits in zip(ceilings, zip(*rounds, strict=True), strict=True):
        assert all(0 <= wait <= ceiling for wait in waits)
        assert max(waits) > ceiling * 0.9
        assert min(waits) < ceiling * 0.1
    assert all(backoff.next() <= 5.0 for _ in range(5000)), "years of failures"


ITEMS = [f"{number:05}" for number in range(2500)]


def pages_of(items: list[str], size: int = 0, token: str = "") -> tuple[list[str], str]:
    request = api.ListQuotasRequest(page_size=size, page_token=token)
    found, token = listed(items, request, api.Quota, key=str, encode=lambda one: api.Quota(tenant=one))
    return [one.tenant for one in found], token


@pytest.mark.parametrize(
    ("asked", "given"), [(0, 100), (1, 1), (1000, 1000), (1001, 1000), (2**31 - 1, 1000)]
)
def test_page_size_has_a_default_and_a_limit(asked: int, given: int) -> None:
    assert len(pages_of(ITEMS, asked)[0]) == given


def test_items_that_come_and_go_between_pages_move_nothing() -> None:
    first, token = pages_of(["b", "d", "f"], 2)
    assert first == ["b", "d"]
    assert pages_of(["a", "c", "e", "f"], 2, token) == (["e", "f"], "")


def _forged() -> list[str]:
    token = pages_of(ITEMS, 2)[1]
    encoded = [base64.urlsafe_b64encode(raw).decode() for raw in (b"00001", b"\xff" * 20)]
    return ["x", "?", "ä", token[:-1], token + "A", token.swapcase(), token + "=", *encoded]


@pytest.mark.parametrize(
    ("size", "token", "field"), [(-1, "", "page_size"), *((2, token, "page_token") for token in _forged())]
)
def test_negative_sizes_and_forged_tokens_are_refused(size: int, token: str, field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        pages_of(ITEMS, size, token)
    assert caught.value.violations[0].field == field


def test_a_service_is_found_by_its_name_and_nothing_but_the_contract_is_imported_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    imported, load = list[str](), wire.import_module
    monkeypatch.setattr(wire, "import_module", lambda name: (imported.append(name), load(name))[1])
    wire.find_service.cache_clear()
    for name in ("gpuscale.up.main.X", "os.X", "antigravity.X", "gpuscale.api.allocator.v1.NoService", ""):
        with pytest.raises(KeyError):
            wire.find_service(name)
    found = wire.find_service("externalscaler.ExternalScaler")
    assert found.full_name == "gpuscale.api.keda.v1.ExternalScaler"
    assert imported == ["gpuscale.api.allocator.v1", "gpuscale.api.keda.v1"]
