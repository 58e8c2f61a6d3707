"""Workload traces: when requests arrive and how long each takes to serve.

Reads two forms of CSV, told apart by their header: `arrival_seconds,service_seconds`, or arrival times with tokens (`t_s`,
`context_tokens`, `generated_tokens`, as in the Azure LLM inference traces), from which a service model computes the time.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from gpuscale.common.errors import InvalidArgumentError

MOST_REQUESTS = 2_000_000


@dataclass(frozen=True, slots=True)
class Request:
    """A request: its arrival in seconds from the start, and how long it occupies a slot."""

    arrival: float
    service: float


@dataclass(frozen=True, slots=True)
class ServiceModel:
    """Seconds per request: a base, plus seconds per token read and written."""

    base: float = 0.2
    per_context_token: float = 0.00015
    per_generated_token: float = 0.03

    def seconds(self, context: float, generated: float) -> float:
        """The time of a request."""
        return self.base + self.per_context_token * context + self.per_generated_token * generated


def read_trace(lines: Iterable[str], model: ServiceModel) -> list[Request]:
    """The requests of a CSV file, by arrival. Raises InvalidArgumentError: unknown header or invalid line; the message names the line."""
    reader = csv.DictReader(lines)
    names = set(reader.fieldnames or ())
    if {"arrival_seconds", "service_seconds"} <= names:
        found = list(_requests(reader, "arrival_seconds", lambda row: float(row["service_seconds"])))
    elif {"t_s", "context_tokens", "generated_tokens"} <= names:

        def seconds(row: Mapping[str, str]) -> float:
            return model.seconds(float(row["context_tokens"]), float(row["generated_tokens"]))

        found = list(_requests(reader, "t_s", seconds))
    else:
        raise InvalidArgumentError(
            "the trace needs the columns arrival_seconds,service_seconds or t_s,context_tokens,generated_tokens;"
            f" it has {', '.join(sorted(names)) or 'none'}",
            field="trace",
        )
    if not found:
        raise InvalidArgumentError("the trace has no requests", field="trace")
    return sorted(found, key=lambda request: request.arrival)


def _requests(
    reader: csv.DictReader[str], arrival: str, service: Callable[[Mapping[str, str]], float]
) -> Iterator[Request]:
    for row in reader:
        try:
            request = Request(float(row[arrival]), service(row))
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(
                f"line {reader.line_num} of the trace: {error}", field="trace"
            ) from error
        if not (math.isfinite(request.arrival) and math.isfinite(request.service)) or (
            request.arrival < 0 or request.service < 0
        ):
            raise InvalidArgumentError(
                f"line {reader.line_num} of the trace: times must be finite and not below 0", field="trace"
            )
        if reader.line_num > MOST_REQUESTS:
            raise InvalidArgumentError(f"the trace has more than {MOST_REQUESTS} requests", field="trace")
        yield request
