"""Lists for notebooks: `client.gpus()` and `client.table("nodes")`, shown as a table or as a pandas DataFrame.

with connect() as client:
    client.reservations(filter="holder = ana").to_pandas()
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types.v1 import Gpu
from gpuscale.client.listing import pages, pages_async
from gpuscale.common.errors import InvalidArgumentError
from gpuscale.common.filters import compile_filter, compile_order
from gpuscale.common.sizes import counted
from gpuscale.common.wire import enum_word

if TYPE_CHECKING:
    from gpuscale.client.client import AsyncClient, Client

SHOWN = 200
"""Most rows shown; the data has all."""
_KINDS = """
nodes         fleet.ListNodes                 name state snapshot.host_reading.cpu_percent snapshot.age
gpus          fleet.ListNodes                 name index model state reading.utilization_percent reading.memory_used_bytes holder
reservations  allocator.ListReservations      name holder state gpus remaining tenant create_time
jobs          allocator.ListReservations      name job.title job.state job.exit_code holder gpus job.command
cordons       nodes.ListCordons               target author reason create_time drain_deadline
quotas        quotas.ListQuotas               tenant gpu_milli_held gpu_milli_limit weight waiting_count
endpoints     endpoints.ListEndpoints         name status.desired_replicas status.granted_replicas status.ready_replicas status.summary
replicas      endpoints.ListReplicas          name state node gpu_uuids create_time reason
watchers      queue_watchers.ListQueueWatchers name spec.queue status.state status.ready_count status.message
decisions     decisions.ListDecisions         name before wanted granted limited_by last_time summary
adapters      adapters.ListAdapters           name kind state replica_count templates
recordings    recordings.ListRecordings       name state sample_count duration start_time
health        health.ListHealthEvents         severity check node uuid start_time message
"""
KINDS: Mapping[str, Sequence[str]] = {kind: rest for kind, *rest in map(str.split, _KINDS.split("\n")[1:-1])}
"""The List method of each kind, and the fields shown."""


class TableRows(list[Any]):
    """API messages that notebooks show as a table of some columns; `holders` are those of each GPU, by UUID."""

    def __init__(
        self, items: Iterable[Any], columns: Sequence[str], holders: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(items)
        self._columns, self._holders = columns, holders or {}

    def records(self) -> list[dict[str, Any]]:
        """All fields that are set, by path: times as datetime, durations as timedelta, sizes in bytes."""
        found = [dict(_flat(item)) for item in self]
        return [one | {"holder": self._holders.get(one["uuid"])} if self._holders else one for one in found]

    def to_pandas(self) -> Any:
        """The records as a pandas DataFrame. Raises ModuleNotFoundError: pandas is not installed."""
        return import_module("pandas").DataFrame(self.records())

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        leaves = [path.rpartition(".")[2] for path in self._columns]
        headings = [leaf.removesuffix("_bytes").replace("_", " ") for leaf in leaves]
        rows = [[_shown(path, one.get(path)) for path in self._columns] for one in self.records()[:SHOWN]]
        return headings, rows

    def _repr_html_(self) -> str:
        headings, rows = self._cells()
        lines = [[f"<th>{html.escape(one)}</th>" for one in headings]]
        lines += [[f"<td>{html.escape(one)}</td>" for one in row] for row in rows]
        body = "".join(f"<tr>{''.join(line)}</tr>" for line in lines)
        more = f", the first {SHOWN} shown" if len(self) > SHOWN else ""
        return f"<table>{body}</table><p>{counted(len(self), 'row')}{more}</p>"

    def __repr__(self) -> str:
        headings, rows = self._cells()
        widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
        lines = [
            "  ".join(map(str.ljust, row, widths)).rstrip()
            for row in ([one.upper() for one in headings], *rows)
        ]
        return "\n".join([*lines, *(["…"] if len(self) > SHOWN else [])])


def _flat(message: Message, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The fields of a message and its parts, by path, without absent ones."""
    for field in message.DESCRIPTOR.fields:
        path, of = f"{prefix}{field.name}", field.message_type
        value: Any = getattr(message, field.name)
        if of is not None and of.GetOptions().map_entry:
            yield from ((f"{path}.{key}", one) for key, one in value.items())
        elif field.is_repeated:
            yield path, [dict(_flat(one)) if of else one for one in value]
        elif field.has_presence and not message.HasField(field.name):
            continue
        elif field.enum_type is not None:
            yield path, enum_word(message, field.name) or None
        elif of is not None and of.full_name == "google.protobuf.Duration":
            yield path, value.ToTimedelta()
        elif of is not None and of.full_name == "google.protobuf.Timestamp":
            yield path, value.ToDatetime(UTC)
        elif of is not None:
            yield from _flat(value, f"{path}.")
        else:
            yield path, value


def _shown(path: str, value: Any) -> str:
    """A value for display; `-` if absent."""
    items: Any = value
    if value is None or value in ("", []):
        return "-"
    if path.endswith("_bytes"):
        return f"{value / 2**30:.1f} GiB"
    if isinstance(value, list):
        return str(len(items)) if isinstance(items[0], dict) else ", ".join(map(str, items))
    if isinstance(value, datetime):
        return f"{value.astimezone():%Y-%m-%d %H:%M:%S %Z}"
    if isinstance(value, timedelta):
        return str(timedelta(seconds=round(value.total_seconds())))
    if path in {"name", "target", "node"}:
        return "/".join(str(value).split("/")[1::2]) or str(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def table(client: Client, kind: str, options: Mapping[str, Any]) -> TableRows:
    """All resources of a kind. Raises the errors of `_asked`, and GpuscaleError."""
    service, method, request = _asked(kind, options)
    found = list(pages(getattr(getattr(client, service), method), request))
    return _rows(kind, found, table(client, "reservations", {}) if kind == "gpus" else (), options)


async def table_async(client: AsyncClient, kind: str, options: Mapping[str, Any]) -> TableRows:
    """`table` for async code."""
    service, method, request = _asked(kind, options)
    found = [page async for page in pages_async(getattr(getattr(client, service), method), request)]
    holding = await table_async(client, "reservations", {}) if kind == "gpus" else ()
    return _rows(kind, found, holding, options)


def _asked(kind: str, options: Mapping[str, Any]) -> tuple[str, str, Any]:
    """The service, method and request that list a kind. Raises InvalidArgumentError: unknown kind or option."""
    if kind not in KINDS:
        near = get_close_matches(kind, KINDS, 1) or [", ".join(KINDS)]
        raise InvalidArgumentError(f"unknown kind {kind!r}; did you mean {near[0]}?")
    service, _, method = KINDS[kind][0].partition(".")
    named = (getattr(api, f"{method}Request", None) for api in (allocator_api, autoscaler_api, monitor_api))
    of: Any = next(filter(None, named))
    known = {"filter", "order_by"} if kind == "gpus" else {*of.DESCRIPTOR.fields_by_name} - {"page_token"}
    for name in options:
        if name not in known:
            raise InvalidArgumentError(f"unknown option {name!r}; {kind} take {', '.join(sorted(known))}")
    request = of(**({} if kind == "gpus" else options))
    if kind == "jobs":
        request.filter = f"job:* AND ({request.filter})" if request.filter else "job:*"
    return service, method, request


def _rows(kind: str, found: Sequence[Any], holding: Sequence[Any], options: Mapping[str, Any]) -> TableRows:
    items = [item for page in found for item in getattr(page, page.DESCRIPTOR.fields[0].name)]
    if kind != "gpus":
        return TableRows(items, KINDS[kind][1:])
    meets = compile_filter(options.get("filter", ""), Gpu)
    chosen = filter(meets, (gpu for node in items for gpu in node.snapshot.gpus))
    gpus = sorted(chosen, key=compile_order(options.get("order_by", ""), Gpu))
    return TableRows(gpus, KINDS[kind][1:], {gpu.uuid: one.holder for one in holding for gpu in one.gpus})
