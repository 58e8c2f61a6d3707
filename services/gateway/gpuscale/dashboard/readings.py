"""All that is read of one GPU as rows, by topic, and what runs on it. Pure.

Names and units come from the contract, so that a reading that is added is shown without a word here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpuscale.api.types import v1 as types_api
from gpuscale.dashboard import humanize
from gpuscale.dashboard.rows import Columns, Row

TOPICS: Mapping[str, tuple[str, ...]] = {
    topic: tuple(names.split()) or ("",)
    for topic, names in {
        "activity": "utilization memory_util encoder decoder graphics sm_a sm_o tensor memory_b fp",
        "clocks": "sm_clock memory_clock video_clock performance throttle",
        "throttled for": "power_violation thermal sync_boost board_limit low_util reliability",
        "power and heat": "temperature memory_temperature power energy fan",
        "memory and errors": "memory ecc retired remapped recovery",
        "PCIe": "pcie bar1",
        "NVLink": "nvlink",
        "modes": "",
    }.items()
}
"""What the names of its readings begin with; a reading belongs to the first that has it."""
PROCESSES: Columns = {
    "pid": "process",
    "user": "user",
    "program": "program",
    "memory": "memory",
    "used": "utilization",
    "reservation": "reservation",
    "start": "since",
    "container": "pod or container",
}
_LEFT_OUT = {"throttle_reason_mask", "processes", "absent_readings", "age"}
_WORDS = {word.lower(): word for word in ("SM", "PCIe", "NVLink", "ECC", "CRC", "BAR1", "vGPU")}
_UNITS: Mapping[str, Callable[[Any], str]] = {
    "bytes": humanize.size,
    "bytes per second": lambda rate: f"{humanize.size(rate)}/s",
    "percent": lambda value: humanize.number(value, "%", 1),
    "celsius": lambda value: humanize.number(value, "°C"),
    "watts": lambda value: humanize.number(value, "W"),
    "joules": lambda value: humanize.number(value / 3.6e6, "kWh", 1),
    "mhz": lambda value: humanize.number(value, "MHz"),
    "seconds": humanize.span,
    "count": str,
}


def by_topic(read: types_api.GpuReading) -> dict[str, list[Row]]:
    """What is read now, and what is read and is nothing; what is absent has no row."""
    found: dict[str, list[Row]] = {topic: [] for topic in TOPICS}
    reading: Any = read
    for field in reading.DESCRIPTOR.fields:
        value: Any = getattr(reading, field.name)
        read_as = "throttle_reason_mask" if field.is_repeated else field.name
        if field.name in _LEFT_OUT or not (reading.HasField(read_as) or (field.is_repeated and value)):
            continue
        topic = next(topic for topic, names in TOPICS.items() if field.name.startswith(names))
        name: str = field.name.replace("_", " ")
        unit = next((unit for unit in sorted(_UNITS, key=len, reverse=True) if name.endswith(f" {unit}")), "")
        if field.is_repeated:
            shown = ", ".join(value) or "none"
        elif isinstance(value, bool):
            shown = "yes" if value else "no"
        else:
            shown = humanize.word(reading, field.name) if field.enum_type else _UNITS.get(unit, str)(value)
        rate = " rate" if unit.endswith("second") else ""
        words = [_WORDS.get(word, word) for word in (name.removesuffix(unit) + rate).split()]
        found[topic].append({"reading": " ".join(words), "value": shown})
    return found


def _use(process: types_api.GpuProcess) -> str:
    """Its utilization, and what it uses of the encoders and decoders where it does."""
    words = {"": "", "encoder_": ", encoder ", "decoder_": ", decoder "}
    shares = {word: getattr(process, f"{name}utilization_percent") for name, word in words.items()}
    if not process.HasField("utilization_percent"):
        return humanize.UNKNOWN
    return "".join(word + humanize.number(share, "%") for word, share in shares.items() if share or not word)


def process_rows(processes: Sequence[types_api.GpuProcess]) -> list[Row]:
    """What runs on a GPU."""
    return [
        {
            "pid": str(one.pid),
            "user": one.user or humanize.UNKNOWN,
            "program": one.program or one.command or humanize.UNKNOWN,
            "memory": humanize.size(one.memory_used_bytes if one.HasField("memory_used_bytes") else None),
            "used": _use(one),
            "reservation": one.reservation.removeprefix("reservations/")
            or ("none", "unknown")[one.holder_unknown],
            "start": humanize.clock(one.start_time),
            "container": one.pod or one.container,
        }
        for one in processes
    ]
