"""Structured logs on stderr: an event, a short lower-case phrase, and its context as key=value.

Everything goes through the standard library's logging, so records of other libraries look the same. Secrets are
redacted by type, and tracebacks never show local variables.
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

# structlog loads rich where that is installed, for tracebacks that we never show: 6 MB of each program.
_rich = cast("Any", sys.modules).setdefault("rich", None)
import structlog  # noqa: E402

if _rich is None:
    del sys.modules["rich"]

# Libraries that tell every request, some with its content.
_CHATTY = ("aio_pika", "aiormq", "httpcore", "httpx", "sqlalchemy")


def redact(value: object) -> object:
    """The value with every secret in it, at any depth of its containers, replaced by what may be shown."""
    if hasattr(value, "get_secret_value"):  # ours, and the text and bytes of pydantic
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
"""The request id of the current call, in each line of the log."""


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
    """The logger of a module: `get_logger(__name__)`. Works before `configure`, as standard logging does."""
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


def configure(
    level: str = "info",
    format: str = "auto",  # noqa: A002
    stream: TextIO | None = None,
    *,
    service: str = "",
) -> None:
    """Write the log of this process to stderr; replaces what an earlier call set up.

    Args:
        level: the least level that is written.
        format: `console` for people, `json` for one object a line, `auto` for console on a terminal and else JSON.
        stream: where to write instead of stderr.
        service: what JSON lines call this process; they name its host and version too.
    """
    global _json  # noqa: PLW0603 - as the handlers of logging are, it is of the process
    target = stream or sys.stderr
    console = format == "console" or (format == "auto" and target.isatty())
    _json = not console
    if console:
        # The default of structlog prints local variables with a traceback, secrets included, where rich is installed.
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
    """Whether the log of this process is JSON."""
    return _json


def capture() -> None:
    """Have what Python itself writes to stderr, warnings and errors that nobody caught, be lines of the log."""
    log = get_logger("gpuscale")

    def uncaught(kind: type[BaseException], error: BaseException, _trace: TracebackType | None) -> None:
        log.error("an error was not caught", error=kind.__name__, exc_info=error)

    def of_thread(told: threading.ExceptHookArgs) -> None:
        name = told.thread.name if told.thread is not None else ""
        log.error("an error ended a thread", thread=name, exc_info=told.exc_value or True)

    def unraisable(told: "sys.UnraisableHookArgs") -> None:
        log.error("an error could not be raised", where=repr(told.object), exc_info=told.exc_value or True)

    logging.captureWarnings(capture=True)
    sys.excepthook, threading.excepthook, sys.unraisablehook = uncaught, of_thread, unraisable
