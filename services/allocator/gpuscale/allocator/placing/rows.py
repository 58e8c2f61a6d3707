"""Rows: a row of the columns as plain numbers, for when only a few have changed. Pure.

An operation on an array costs a microsecond however small the array is, and a shape takes some eighty of them. For a few
rows the same rules, GPU by GPU, cost a tenth of that. What is answered here is what `placing.constraints` and
`placing.policies` answer for whole arrays, to the last bit: a property test compares them.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import compress
from operator import not_
from typing import Final

from gpuscale.allocator.domain.model import WHOLE, Ask, Policy
from gpuscale.allocator.placing.columns import UNKNOWN, WHOLE_GPU
from gpuscale.allocator.placing.constraints import CODES, Constraints, floor_on, milli_on
from gpuscale.allocator.placing.obstacles import ADMITS_ALL_PERCENT, Obstacle
from gpuscale.allocator.placing.policies import (
    BESTFIT_CPU,
    BESTFIT_GPU,
    BUCKET,
    CPU_BUCKET,
    PRICE_WEIGHT,
    TIGHTNESS,
    Tariff,
)
from gpuscale.allocator.placing.row import Row

MOST: Final = 128
"""Up to so many GPUs are looked at here; for more of them arrays are quicker."""
NO_FIT: Final = -math.inf

_SPREAD: Final = Policy.SPREAD  # looked up in an enum, a member takes as long as a call
_ONLINE, _IS_STALE = 0, 1
_MODEL: Final = CODES[Obstacle.MODEL_DIFFERS]
_PROFILE: Final = CODES[Obstacle.MIG_PROFILE_DIFFERS]
_OFFLINE: Final = CODES[Obstacle.NODE_NOT_ONLINE]
_STALE: Final = CODES[Obstacle.STALE]
_TROUBLE: Final = CODES[Obstacle.GPU_NOT_OK]
_QUARANTINED: Final = CODES[Obstacle.QUARANTINED]
_CORDONED: Final = CODES[Obstacle.CORDONED]
_HELD: Final = CODES[Obstacle.HELD]
_CPU: Final = CODES[Obstacle.CPU_BELOW_MIN]
_HOST_MEMORY: Final = CODES[Obstacle.HOST_MEMORY_BELOW_MIN]
_MEMORY_UNKNOWN: Final = CODES[Obstacle.MEMORY_UNKNOWN]
_MEMORY: Final = CODES[Obstacle.MEMORY_BELOW_MIN]
_UTILIZATION_UNKNOWN: Final = CODES[Obstacle.UTILIZATION_UNKNOWN]
_UTILIZATION: Final = CODES[Obstacle.UTILIZATION_TOO_HIGH]


def plain(ask: Ask) -> bool:
    """Whether an ask is looked at here: one that chooses no names or labels, by a policy that is quick to reckon."""
    chosen = ask.nodes or ask.excluded_nodes or ask.node_labels or ask.gpus or ask.excluded_gpus
    return not (chosen or ask.apart_from or ask.policy is Policy.FGD)


def node_code(ask: Ask, row: Row) -> int:
    """The first obstacle of the node as such, as `Constraints.codes`."""
    if row.state not in (_ONLINE, _IS_STALE):
        return _OFFLINE
    return _short(ask, row) or (_STALE if row.state == _IS_STALE else _CORDONED if row.node_cordoned else 0)


def gpu_codes(ask: Ask, row: Row, constraints: Constraints, now: float, columns: Iterable[int]) -> list[int]:
    """The first obstacle of the GPUs in some columns, as `Constraints.codes`."""
    admitted = constraints.admitted() if ask.models else None
    node = 0 if row.state == _ONLINE else _STALE if row.state == _IS_STALE else _OFFLINE
    kind, short = constraints.kind, _short(ask, row)
    found: list[int] = []
    for column in columns:
        held = row.held[column]
        if admitted is not None and not admitted[row.model[column]]:
            code = _MODEL
        elif row.kind[column] != kind:
            code = _PROFILE
        elif node:
            code = node
        elif row.fresh_until[column] < now:
            code = _STALE
        elif row.trouble[column]:
            code = _TROUBLE
        elif row.quarantined[column]:
            code = _QUARANTINED
        elif row.node_cordoned or row.cordoned[column]:
            code = _CORDONED
        elif held and held + milli_on(ask, row.total[column]) > WHOLE:
            code = _HELD
        else:
            code = short or _by_readings(ask, row, column)
        found.append(code)
    return found


def value(
    ask: Ask, row: Row, node: int, codes: Sequence[int], constraints: Constraints, tariff: Tariff
) -> float:
    """How good the row is for the ask, as `policies.value`; NO_FIT where it does not fit.

    `node` and `codes` are what `node_code` and `gpu_codes` found, for all columns.
    """
    if (codes.count(0) < ask.gpu_count) if ask.gpu_count else node:
        return NO_FIT
    if ask.policy is _SPREAD:
        return _spread(ask, row, codes)
    if ask.policy is Policy.FIRSTFIT:
        return 0.0
    cpu, gpu = float(row.cpu_free), _free(row, constraints.kind)
    known, taken = (
        row.cpu_free != UNKNOWN,
        float(ask.gpu_count * milli_on(ask, row.total[0] if row.total else None)),
    )
    if ask.policy is Policy.BESTFIT:
        left = (cpu - ask.cpu_milli) / BESTFIT_CPU if known else 0.0
        return float(math.floor(100.0 * (1.0 - 0.5 * (left + (gpu - taken) / BESTFIT_GPU))))
    drop = _drop(ask, cpu, gpu, taken, tariff) if known else 0.0
    if not ask.gpu_count:
        return float(math.floor(drop / CPU_BUCKET))
    price = 0.0 if ask.models else tariff.prices.get(row.model[0], 0.0)
    return float(math.floor((drop - TIGHTNESS * gpu - PRICE_WEIGHT * (price * taken)) / BUCKET))


def _short(ask: Ask, row: Row) -> int:
    """CPU or main memory that the node lacks, as an obstacle."""
    if ask.cpu_milli and row.cpu_free < ask.cpu_milli:
        return _CPU
    return _HOST_MEMORY if ask.host_memory_bytes and row.memory_free < ask.host_memory_bytes else 0


def _by_readings(ask: Ask, row: Row, column: int) -> int:
    """The first obstacle that readings tell of; utilization does not count where others share the GPU already."""
    available, used = row.available[column], row.utilization[column]
    if available == UNKNOWN:
        return _MEMORY_UNKNOWN
    if available < floor_on(ask, row.total[column]):
        return _MEMORY
    if row.held[column]:
        return 0
    if math.isnan(used):
        return 0 if ask.allow_unknown_utilization else _UTILIZATION_UNKNOWN
    limit = ask.max_utilization_percent
    return _UTILIZATION if limit < ADMITS_ALL_PERCENT and used >= limit else 0


def _spread(ask: Ask, row: Row, codes: Sequence[int]) -> float:
    """The mean score of the best GPUs, added up from the best on; the free CPU where no GPU is asked for."""
    if not ask.gpu_count:
        return float(row.cpu_free)
    scores = compress(row.spread(ask.weights), map(not_, codes))
    if ask.gpu_count == 1:
        return max(scores)
    total = 0.0
    for score in sorted(scores, reverse=True)[: ask.gpu_count]:
        total += score
    return total / ask.gpu_count


def _free(row: Row, kind: int) -> float:
    """Thousandths of the GPUs of that kind that work and nobody holds."""
    if kind == WHOLE_GPU:
        return float(row.free_milli)
    return float(
        sum(
            WHOLE - held
            for column, (held, one) in enumerate(zip(row.held, row.kind, strict=True))
            if one == kind and not row.out_of_use(column)
        )
    )


def _drop(ask: Ask, cpu: float, gpu: float, taken: float, tariff: Tariff) -> float:
    """As `policies` reckons it, of a node that tells its CPU."""
    if not ask.cpu_milli or not tariff.cpu_per_gpu:
        return 0.0
    fed = (cpu - ask.cpu_milli) / tariff.cpu_per_gpu
    return max(gpu - cpu / tariff.cpu_per_gpu, 0.0) - max((gpu - taken) - fed, 0.0)
