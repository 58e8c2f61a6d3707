"""The watches of `get --watch`: they receive changes, and do not poll."""

import threading
import time
from collections.abc import Sequence
from typing import Any

from google.protobuf.message_factory import GetMessageClass

from gpuscale.api.autoscaler import v1 as api
from gpuscale.cli.console.terminal import pause
from gpuscale.client import Client, GpuscaleError, Mirror, watch

LEAST = 0.2
"""Seconds between two readings, at least: changes that come together are read together."""
NODES_MILLIS = 2000
"""Least time between two updates of the nodes, in which each that works changes every second."""
_LESS = (api.ListDecisionsRequest, api.ListRulesRequest)
"""Lists of which no watch tells all: it says when to ask."""


class Streams:
    """The watches of all lists that a command reads.

    Attributes:
        polled: whether there is a list without a watch.
    """

    def __init__(self, client: Client) -> None:
        self.polled = False
        self._client = client
        self._changed = threading.Event()
        self._by: dict[tuple[str, bytes], Mirror] = {}

    def pause(self, every: float, *, away: bool) -> None:
        """Return after a change; after so many seconds where a list is polled, and at the latest then while a service is away."""
        if self.polled:
            pause(every)
            return
        time.sleep(LEAST)
        self._changed.wait(max(0.0, every - LEAST) if away else None)
        self._changed.clear()

    def items(self, service: Any, request: Any, fields: Sequence[str] = ()) -> list[Any] | None:
        """What a List method would answer, of `fields` if not of all; None where it must be asked, at first and wherever its watch tells less."""
        whole = not isinstance(request, _LESS)
        if isinstance(request, api.ListRulesRequest):  # parts of endpoints
            service, request = self._client.endpoints, api.ListEndpointsRequest()
        noun = type(request).__name__.removeprefix("List").removesuffix("Request")
        name = "WatchHealth" if noun == "HealthEvents" else f"Watch{noun}"
        method = getattr(service, name, None)
        if method is None:
            self.polled = True
            return None
        wanted: Any = GetMessageClass(request.DESCRIPTOR.file.message_types_by_name[f"{name}Request"])()
        known = wanted.DESCRIPTOR.fields_by_name
        for field, value in request.ListFields():
            if field.name in known:
                setattr(wanted, field.name, value)
            else:
                whole = whole and field.name == "page_size"
        if "min_interval" in known:
            wanted.min_interval.FromMilliseconds(NODES_MILLIS)
        if fields and "read_mask" in known:
            wanted.read_mask.paths.extend(fields)
        key = name, wanted.SerializeToString()
        if key not in self._by:
            self._by[key] = Mirror()
            threading.Thread(target=self._follow, args=(self._by[key], method, wanted), daemon=True).start()
        return [*self._by[key].items.values()] if whole and self._by[key].complete else None

    def _follow(self, mirror: Mirror, method: Any, request: Any) -> None:
        """Follow a watch until the client is closed; after a lost connection it resumes."""
        try:
            for message in watch(method, request, resume=True):
                if mirror.take(message):
                    self._changed.set()
        except GpuscaleError:
            mirror.complete, self.polled = False, True  # asked from now on, which reports what is wrong
            self._changed.set()
