"""Rows of the tables that say what other systems do, asked over gRPC: what is there, and what comes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gpuscale.api.autoscaler import v1 as api
from gpuscale.common.wire import enum_word, to_duration
from tests.support.asking_autoscaler import Asking

UNKNOWN = None
"""What a signal shows that cannot be had."""


@dataclass(frozen=True)
class Row:
    """So many replicas, and what signals show (by id; the one of the spec where only a number is given): so many then.

    `silent`: so many replicas say nothing of a signal that they report. `rests`: seconds since rules last changed the count. `limit`: what held it back, where that is to be told.
    """

    before: int
    shows: float | Mapping[str, float | None] | None
    wanted: int
    limit: str | None = None
    rests: Mapping[str, float] = field(default_factory=dict)
    unknown: int = 0
    proven: bool | None = None
    silent: int = 0
    gpu_limit: int | None = None


async def differing(asked: Asking, spec: api.EndpointSpec, rows: Iterable[Row]) -> list[str]:
    """The rows of which something else comes, with what came, for the rules in their order and in the opposite one."""
    turned = api.EndpointSpec()
    turned.CopyFrom(spec)
    del turned.rules[:]
    turned.rules.extend(reversed(spec.rules))
    found = await asyncio.gather(*(_differs(asked, one, row) for row in rows for one in (spec, turned)))
    return [one for one in found if one]


async def _differs(asked: Asking, spec: api.EndpointSpec, row: Row) -> str:
    decision = (await asked.evaluate(_request(spec, row))).decision
    came = (decision.wanted, enum_word(decision, "limited_by"))
    expected = (row.wanted, enum_word(decision, "limited_by") if row.limit is None else row.limit)
    return "" if came == expected else f"{row}: {came} ({decision.summary})"


def _request(spec: api.EndpointSpec, row: Row) -> api.EvaluateRequest:
    shows = row.shows if isinstance(row.shows, Mapping) else {spec.signals[0].id: row.shows}
    rests = [api.StatedRuleChange(rule=rule, age=to_duration(age)) for rule, age in row.rests.items()]
    return api.EvaluateRequest(
        spec=spec,
        before=row.before,
        unknown_replicas=row.unknown,
        signals=[
            api.StatedSignal(signal=name, value=value, proven_empty=row.proven, silent_count=row.silent)
            for name, value in shows.items()
        ],
        past=api.StatedPast(rule_changes=rests),
        gpu_limit=row.gpu_limit,
    )
