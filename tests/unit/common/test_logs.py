"""Logs: one object a line, secrets redacted by type, no local variables."""

import io
import json
import logging
import socket
import sys
import threading
import warnings
from importlib.metadata import version

import pytest
from sqlalchemy.exc import IntegrityError

from gpuscale.common.runtime import logs
from gpuscale.common.secrets import SecretStr, SecretUrl

CANARY = "canary"


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_of_json_says_where_it_is_from() -> None:
    logs.configure("info", "json", stream := io.StringIO(), service="gpuscale-fleet")
    logs.get_logger("a").info("lost", service="the other")
    logging.getLogger("theirs").warning("theirs")
    ours, theirs = lines(stream)
    assert ours.items() >= {"event": "lost", "service": "the other", "host": socket.gethostname()}.items()
    said = {"event": "theirs", "service": "gpuscale-fleet", "version": version("gpuscale")}
    assert theirs.items() >= said.items()


def test_what_python_writes_by_itself_is_a_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((sys, "excepthook"), (sys, "unraisablehook"), (threading, "excepthook")):
        monkeypatch.setattr(module, name, getattr(module, name))
    logs.configure("info", "json", stream := io.StringIO())
    try:
        logs.capture()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(warnings, "filters", [])
            warnings.warn("old", DeprecationWarning, stacklevel=1)
        thread = threading.Thread(target=lambda: 1 / 0, name="worker")
        thread.start()
        thread.join()
        sys.excepthook(KeyError, KeyError("left"), None)
    finally:
        logging.captureWarnings(capture=False)
    warned, ended, uncaught = lines(stream)
    assert "DeprecationWarning: old" in str(warned["event"])
    assert (ended["thread"], "ZeroDivisionError" in str(ended["exception"])) == ("worker", True)
    assert (uncaught["error"], "left" in str(uncaught["exception"])) == ("KeyError", True)


def test_an_event_is_one_json_object_with_its_context() -> None:
    logs.configure("info", "auto", stream := io.StringIO())
    logs.get_logger("gpuscale.test").info("node joined", node="a", gpus=8)
    (line,) = lines(stream)
    assert line.items() >= {"event": "node joined", "node": "a", "gpus": 8, "level": "info"}.items()
    assert line["logger"] == "gpuscale.test"
    assert str(line["timestamp"]).endswith("Z")


def test_a_logger_made_before_configure_writes_after_it_each_line_once() -> None:
    log = logs.get_logger("gpuscale.early")
    logs.configure("info", "json", io.StringIO())
    logs.configure("warning", "json", stream := io.StringIO())
    log.info("not shown")
    log.warning("shown")
    assert [line["event"] for line in lines(stream)] == ["shown"]


def test_records_of_other_libraries_look_the_same() -> None:
    logs.configure("info", "json", stream := io.StringIO())
    logging.getLogger("grpc").warning("%s of %s", "one", "two", extra={"peer": "b"})
    (line,) = lines(stream)
    assert line.items() >= {"event": "one of two", "level": "warning", "logger": "grpc", "peer": "b"}.items()


def test_libraries_that_log_every_statement_are_quiet_even_at_debug() -> None:
    logs.configure("debug", "json", stream := io.StringIO())
    for name in ("sqlalchemy.engine.Engine", "aiormq.connection", "httpx"):
        logging.getLogger(name).info(CANARY)
    assert stream.getvalue() == ""


@pytest.mark.parametrize("style", ["console", "json"])
def test_secrets_are_redacted_wherever_they_stand(style: str) -> None:
    logs.configure("debug", style, stream := io.StringIO())
    url = SecretUrl(f"amqp://user:{CANARY}@mq.example/")
    secret = SecretStr(CANARY)
    logs.get_logger("x").info("connecting", url=url, deep={"list": [secret, {"key": (url,)}]}, token=secret)
    logging.getLogger("y").warning("%s %s", url, secret)
    written = stream.getvalue()
    assert CANARY not in written
    assert "mq.example" in written


@pytest.mark.parametrize("style", ["console", "json"])
def test_a_traceback_is_written_without_local_variables(style: str) -> None:
    def fail() -> None:
        password = CANARY
        raise ValueError(f"length {len(password)}")

    logs.configure("info", style, stream := io.StringIO())
    try:
        fail()
    except ValueError:
        logs.get_logger("x").exception("it failed")
    written = stream.getvalue()
    assert "ValueError: length 6" in written
    assert "in fail" in written
    assert f"'{CANARY}'" not in written


def test_context_that_is_not_json_is_written_as_text() -> None:
    logs.configure("info", "json", stream := io.StringIO())
    logs.get_logger("x").info("odd", error=IntegrityError("INSERT", None, ValueError("x")), kind=object)
    assert "class 'object'" in str(lines(stream)[0]["kind"])


def test_of_attempts_the_first_failure_in_a_row_is_logged_and_others_are_raised() -> None:
    logs.configure("info", "json", stream := io.StringIO())
    saving = logs.Attempts(logs.get_logger("a"), "cannot save", OSError)
    for failure in (OSError("full"), OSError("again"), None, OSError("gone")):
        with saving:
            if failure is not None:
                raise failure
        assert saving.failing == (failure is not None)
    with pytest.raises(KeyError), saving:
        raise KeyError
    assert [line["problem"] for line in lines(stream)] == ["full", "gone"]
