"""Structured logs on stderr: an event (a short lower-case phrase) with context as key=value.

Everything goes through the standard logging module, so records of other libraries look the same. Secrets are redacted
by type, and tracebacks never show local variables.
"""

import logging
import socket
import sys
import threading
from collections.abc import Collection, Mapping, MutableMapping
from contextvars import ContextVar
from types import TracebackType
from typing import Any, TextIO, cast

from gpuscale.common import VERSION
from gpuscale.common.secrets import SecretUrl

# structlog imports rich if installed, for tracebacks that we never show: 6 MB per program.
_rich = cast("Any", sys.modules).setdefault("rich", None)
import structlog  # noqa: E402

if _rich is None:
    del sys.modules["rich"]

# These log every request, some with its content.
_CHATTY = ("aio_pika", "aiormq", "httpcore", "httpx", "sqlalchemy")


def redact(value: object) -> object:
    """The value with all secrets masked, in nested containers too."""
    if hasattr(value, "get_secret_value"):  # ours, and pydantic's SecretStr and SecretBytes
        return "***"
    if isinstance(value, SecretUrl):
        return str(value)
    if isinstance(value, Mapping):
        return {redact(key): redact(item) for key, item in cast("Mapping[object, object]", value).items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [redact(item) for item in cast("Collection[object]", value)]
    return value


def _redact_event(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for key, value in event.items():
        event[key] = value if key == "exc_info" else redact(value)
    return event


call_id: ContextVar[str] = ContextVar("gpuscale_call_id", default="")
"""The request id of the current call, added to each log line."""


def _name_call(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    if call := call_id.get():
        event.setdefault("request_id", call)
    return event


_json = False
_SHARED: tuple[structlog.typing.Processor, ...] = (
    _name_call,
    structlog.stdlib.add_logger_name,
    structlog.stdlib.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    _redact_event,
)


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """The logger of a module: `get_logger(__name__)`. May be called before `configure`."""
    logger: structlog.stdlib.BoundLogger = structlog.wrap_logger(
        logging.getLogger(name),
        wrapper_class=structlog.stdlib.BoundLogger,
        processors=[
            structlog.stdlib.filter_by_level,
            *_SHARED,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
    )
    return logger


class Attempts:
    """Attempts at something that is done again and again: failures of a block are caught, the first in a row logged."""

    def __init__(self, log: structlog.stdlib.BoundLogger, event: str, *failures: type[Exception]) -> None:
        self._log, self._event, self._failures = log, event, failures
        self.failing = False

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        before, self.failing = self.failing, isinstance(error, self._failures)
        if self.failing and not before:
            self._log.warning(self._event, problem=str(error))
        return self.failing


def configure(
    level: str = "info",
    format: str = "auto",  # noqa: A002
    stream: TextIO | None = None,
    *,
    service: str = "",
) -> None:
    """Log to stderr, or `stream`, from `level` on; replaces an earlier configuration.

    `format` is `console`, `json` (one object per line), or `auto`: console on a terminal, else JSON. Lines of JSON have the
    name `service` of this process, its host and version.
    """
    global _json  # noqa: PLW0603 - per process, as the handlers of logging
    target = stream or sys.stderr
    console = format == "console" or (format == "auto" and target.isatty())
    _json = not console
    if console:
        # With rich installed, the default prints local variables with a traceback, secrets included.
        renderers: tuple[structlog.typing.Processor, ...] = (
            structlog.dev.ConsoleRenderer(
                colors=target.isatty(), exception_formatter=structlog.dev.plain_traceback
            ),
        )
    else:
        origin = {"host": socket.gethostname(), "service": service, "version": VERSION}
        renderers = (
            lambda _logger, _method, event: {**origin, **event},
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(default=str, sort_keys=False),
        )
    handler = logging.StreamHandler(target)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*_SHARED, structlog.stdlib.ExtraAdder()],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)


def writes_json() -> bool:
    """Whether this process logs JSON."""
    return _json


def capture() -> None:
    """Log warnings and uncaught errors, which Python prints to stderr."""
    log = get_logger("gpuscale")

    def uncaught(kind: type[BaseException], error: BaseException, _trace: TracebackType | None) -> None:
        log.error("uncaught error", error=kind.__name__, exc_info=error)

    def of_thread(args: threading.ExceptHookArgs) -> None:
        name = args.thread.name if args.thread is not None else ""
        log.error("a thread failed", thread=name, exc_info=args.exc_value or True)

    def unraisable(args: "sys.UnraisableHookArgs") -> None:
        log.error("unraisable error", where=repr(args.object), exc_info=args.exc_value or True)

    logging.captureWarnings(capture=True)
    sys.excepthook, threading.excepthook, sys.unraisablehook = uncaught, of_thread, unraisable
