"""The calendar of bookings: what is booked on each node and day, over midnight too."""

from datetime import UTC, datetime

from gpuscale.api.allocator import v1 as api
from gpuscale.common.wire import to_timestamp
from gpuscale.dashboard.pages.reservations import calendar_rows, headings, zone_of

TODAY = datetime(2026, 11, 30, tzinfo=UTC)


def booked(start: datetime, end: datetime, *gpus: str, owner: str = "ann") -> api.Booking:
    names = [f"nodes/{gpu}" for gpu in gpus]
    return api.Booking(start_time=to_timestamp(start), end_time=to_timestamp(end), gpus=names, owner=owner)


def test_a_booking_stands_on_each_of_its_nodes_and_days() -> None:
    over_night = booked(
        datetime(2026, 11, 29, 22, tzinfo=UTC),
        datetime(2026, 12, 1, 1, 30, tzinfo=UTC),
        "a/gpus/1", "a/gpus/2", "b/gpus/1",
    )  # fmt: skip
    short = booked(TODAY.replace(hour=14), TODAY.replace(hour=15), "b/gpus/2", owner="bob")
    later = booked(datetime(2026, 12, 9, tzinfo=UTC), datetime(2026, 12, 10, tzinfo=UTC), "c/gpus/1")
    first, second = calendar_rows([over_night, short, later], TODAY)
    shown = [first[column] for column in ("node", "day0", "day1")]
    assert shown == ["a", "00:00-24:00 2 GPUs ann", "00:00-01:30 2 GPUs ann"]
    assert second["day0"] == "00:00-24:00 1 GPU ann\n14:00-15:00 1 GPU bob"
    assert first["day2"] == ""
    tokyo = TODAY.replace(tzinfo=zone_of("Asia/Tokyo"))
    assert [row["day0"] for row in calendar_rows([short], tokyo)] == ["23:00-24:00 1 GPU bob"]
    assert zone_of("no/zone") is UTC
    assert list(headings(TODAY).values())[:3] == ["node", "Mon 30", "Tue 01"]
