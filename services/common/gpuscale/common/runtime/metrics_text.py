"""Prometheus' text exposition format, version 0.0.4. Pure.

https://prometheus.io/docs/instrumenting/exposition_formats/: every series of a family stands together below its HELP
and TYPE. Written by hand because it is the hot path: for a thousand GPUs it takes 0.15 s of the event loop, in pieces,
and prometheus_client would take 1.4 s (docs/adr/0014).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

Kind = Literal["gauge", "counter", "untyped"]


@dataclass(frozen=True, slots=True)
class Family:
    """The series of one name."""

    name: str
    kind: Kind
    help: str


class MetricsPage:
    """The answer to one scrape. Families stand in the order in which they were first added to."""

    def __init__(self) -> None:
        self._lines: dict[str, list[str]] = {}  # by name: a family is dear to hash

    def add(self, family: Family, labels: str, value: float | None) -> None:
        """Add a sample of a family, with what `labels` made or nothing; no sample where there is no value."""
        if value is None:
            return
        lines = self._lines.get(family.name)
        if lines is None:
            head = f"# HELP {family.name} {_escape_help(family.help)}\n# TYPE {family.name} {family.kind}\n"
            lines = self._lines[family.name] = [head]
        lines.append(f"{family.name}{labels} {value!r}\n")

    def chunks(self) -> Iterator[bytes]:
        """The text, family by family."""
        for lines in self._lines.values():
            yield "".join(lines).encode()


def labels(values: Mapping[str, str]) -> str:
    """The labels of a sample in their order, without those whose value is empty: to Prometheus both are the same."""
    text = ",".join(f'{name}="{_escape(value)}"' for name, value in values.items() if value)
    return f"{{{text}}}" if text else ""


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _escape_help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")
