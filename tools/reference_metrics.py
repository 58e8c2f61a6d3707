"""The reference page of the readings on `/metrics`: their names, ours and DCGM's, and what they are."""

from __future__ import annotations

from collections.abc import Iterable

from gpuscale.monitor.model.prometheus import DCGM, DCGM_CHECKED, GPU, HOST, ReadingSeries

HEAD = """# Every reading on /metrics

Written by `make docs` from the code. [Metrics](../metrics.md) says where these series are shown, and has all others.

"""


def page() -> str:
    """The text of the page."""
    return f"{HEAD}## GPUs\n\n{_gpus()}\n## Hosts\n\n{_table(('series', 'reading', 'what'), _rows(HOST))}"


def _gpus() -> str:
    own, checked = {one.field: one for one in GPU}, {one.field for one in DCGM_CHECKED}
    dcgm = {one.field: f"`{one.family.name}`" for one in DCGM}
    dcgm |= {field: f"{name}, not in `checked`" for field, name in dcgm.items() if field not in checked}
    rows = [
        (series, dcgm.get(field, "-"), f"`{field}`", what) for series, field, what in _rows(GPU, code=False)
    ]
    rows += [
        ("-", dcgm[one.field], f"`{one.field}`", one.family.help) for one in DCGM if one.field not in own
    ]
    return _table(("series", "of DCGM", "reading", "what"), rows)


def _rows(series: Iterable[ReadingSeries], *, code: bool = True) -> list[tuple[str, str, str]]:
    return [
        (f"`{one.family.name}`", f"`{one.field}`" if code else one.field, one.family.help) for one in series
    ]


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
