"""Prometheus' text exposition format, version 0.0.4. Pure.

https://prometheus.io/docs/instrumenting/exposition_formats/: all series of a family follow its HELP and TYPE. Written by
hand because it is a hot path: a thousand GPUs take 0.15 s of the event loop, in pieces; prometheus_client would take
1.4 s (docs/adr/0010).
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Literal

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

Kind = Literal["gauge", "counter", "histogram", "untyped"]
SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds of the buckets of a histogram of durations."""
PIECE: Final = 1 << 16
AT_ONCE: Final = 128
"""Of what may be many thousands, how many add their series before other calls run: about 0.5 ms."""


@dataclass(frozen=True, slots=True)
class Family:
    """A metric: its name, type and help."""

    name: str
    kind: Kind
    help: str


class Histogram:
    """A histogram of durations; the last bucket is for values above all bounds."""

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(SECONDS, value)] += 1
        self.sum += value


class MetricsPage:
    """The page of one scrape. Families keep the order of their first samples."""

    def __init__(self) -> None:
        self._lines: dict[str, list[str]] = {}  # by name: a family is expensive to hash

    def add(self, family: Family, labels: str, value: float | None) -> None:
        """Add a sample, with the result of `labels` or ""; none for a value of None."""
        if value is not None:
            lines = self._lines.get(family.name) or self._begun(family)
            lines.append(f"{family.name}{labels} {value!r}\n")

    def add_histogram(self, family: Family, values: Mapping[str, str], histogram: Histogram) -> None:
        """Add a histogram."""
        lines, name = self._lines.get(family.name) or self._begun(family), family.name
        bounds = [*map(repr, SECONDS), "+Inf"]
        for bound, count in zip(bounds, accumulate(histogram.counts), strict=True):
            lines.append(f"{name}_bucket{labels({**values, 'le': bound})} {count}\n")
        lines.append(f"{name}_sum{labels(values)} {round(histogram.sum, 6)!r}\n")
        lines.append(f"{name}_count{labels(values)} {sum(histogram.counts)}\n")

    def _begun(self, family: Family) -> list[str]:
        text = family.help.replace("\\", "\\\\").replace("\n", "\\n")
        lines = [f"# HELP {family.name} {text}\n# TYPE {family.name} {family.kind}\n"]
        self._lines[family.name] = lines
        return lines

    def chunks(self) -> Iterator[bytes]:
        """The text in pieces of whole families, each of PIECE characters or more but the last."""
        text = ""
        for lines in self._lines.values():
            text += "".join(lines)
            if len(text) >= PIECE:
                yield text.encode()
                text = ""
        yield text.encode()


def labels(values: Mapping[str, str]) -> str:
    """The labels of a sample. Empty values are left out: to Prometheus both are the same."""
    found: list[str] = []
    for name, value in values.items():
        if value:
            escaped = value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
            found.append(f'{name}="{escaped}"')
    return f"{{{','.join(found)}}}" if found else ""
