"""`gpuscalectl logs`: a terminal is not steered by what a replica wrote, and nothing short of its end ends --follow."""

import io
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from gpuscale.api.autoscaler import v1 as api
from gpuscale.cli.commands import logs
from gpuscale.common.errors import NotFoundError, ResourceExhaustedError, UnavailableError

NAME = "endpoints/e/replicas/r"


class Screen(io.BytesIO):
    """Standard output; what is written to it as text goes to the same bytes."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self.buffer = self
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.mark.parametrize(
    ("parts", "shown"),
    [
        ([b"plain\ttext\n"], b"plain\ttext\n"),
        ([b"\x1b[2Jgone\x07\r\n"], b"?[2Jgone??\n"),
        ([b"\xc2\x9b2J"], b"?2J"),
        ([b"\xc2", b"\x9b2J"], b"?2J"),
        ([b"caf\xc3", b"\xa9 \xe2\x82", b"\xac"], "café €".encode()),
        ([b"\xff\x9b["], "\ufffd\ufffd[".encode()),
    ],
    ids=["plain", "escape", "eight bits", "eight bits in two parts", "letters in two parts", "no text"],
)
def test_a_terminal_is_not_steered(parts: list[bytes], shown: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    client: Any = None
    for terminal, expected in ((True, shown), (False, b"".join(parts))):
        screen = Screen(terminal=terminal)
        monkeypatch.setattr("sys.stdout", screen)
        tail = logs._Tail(client, NAME, 100)
        for part in parts:
            tail.write(part)
        assert screen.getvalue() == expected


def part(content: bytes, offset: int, *, ended: bool = False) -> api.ReadReplicaLogResponse:
    end = offset + len(content)
    return api.ReadReplicaLogResponse(content=content, offset=offset, next_offset=end, ended=ended)


def followed(answers: list[Any], monkeypatch: pytest.MonkeyPatch) -> tuple[bytes, list[int], list[float]]:
    """What is shown, from which offsets it was asked for, and how long it was waited."""
    slept, read = list[float](), Mock(side_effect=answers)
    monkeypatch.setattr("time.sleep", slept.append)
    client: Any = SimpleNamespace(endpoints=SimpleNamespace(ReadReplicaLog=read))
    parts = logs._parts([logs._Tail(client, NAME, 100)], follow=True)
    shown = b"".join(part for _, part in parts)
    requests = [one.args[0] for one in read.call_args_list]
    return shown, [one.offset if one.HasField("offset") else -1 for one in requests], slept


def test_following_goes_on_where_it_was_when_all_that_leads_there_was_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As an adapter, an autoscaler or a gateway is while it is restarted."""
    away = UnavailableError("adapters/a is not connected", reason="ADAPTER_DISCONNECTED")
    busy = ResourceExhaustedError("try again", reason="LOGS_BUSY", retry_after=0.25)
    answers = [part(b"one ", 40), away, away, busy, part(b"two", 44), part(b"", 47, ended=True)]
    shown, asked, slept = followed(answers, monkeypatch)
    assert (shown, asked) == (b"one two", [-1, 44, 44, 44, 44, 47])
    assert slept == [logs.PERIOD, logs.PERIOD, 0.25]
    assert capsys.readouterr().err.count("not connected") == 1


def test_following_says_what_was_cut_off_and_ends_with_what_cannot_change(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [part(b"old", 97), part(b"new", 0), part(b"", 3, ended=True)]
    assert followed(answers, monkeypatch)[0] == b"oldnew"
    assert "earlier output was dropped" in capsys.readouterr().err
    with pytest.raises(NotFoundError):
        followed([part(b"x", 0), NotFoundError("it is gone")], monkeypatch)
    with pytest.raises(UnavailableError):
        followed([UnavailableError("nobody is there")], monkeypatch)


def test_one_of_several_that_is_gone_ends_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = {
        "a": Mock(side_effect=[part(b"a1", 0), NotFoundError("a is gone")]),
        "b": Mock(side_effect=[part(b"b1", 0), part(b"b2", 2), part(b"", 4, ended=True)]),
    }
    read = Mock(side_effect=lambda request: answers[request.name]())
    client: Any = SimpleNamespace(endpoints=SimpleNamespace(ReadReplicaLog=read))
    tails = [logs._Tail(client, name, 100) for name in "ab"]
    shown = [(tail.name, part) for tail, part in logs._parts(tails, follow=True) if part]
    assert shown == [("a", b"a1"), ("b", b"b1"), ("b", b"b2")]
    assert "a is gone" in capsys.readouterr().err


def test_of_several_each_line_is_whole_and_says_whose_it_is() -> None:
    client: Any = SimpleNamespace()
    one, other = (logs._Tail(client, f"endpoints/e/replicas/{name}", 100) for name in "ab")
    parts = [(one, b"1\n2"), (other, b"x\n"), (one, b"2\n"), (other, b"y"), (one, b"")]
    assert b"".join(part for _, part in logs._named_lines(parts)) == b"e/a  1\ne/b  x\ne/a  22\ne/b  y\n"
    long = b"z" * logs._PART
    assert next(logs._named_lines([(one, long)]))[1] == b"e/a  " + long + b"\n", "no line is kept for ever"


@pytest.mark.parametrize(
    ("content", "shown"), [(b"x\none\n", b"one\n"), (b"\none\nx", b"one\nx"), (b"progress", b"rogress")]
)
def test_what_is_shown_of_a_long_output_begins_with_a_line(
    content: bytes, shown: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    for offset in (1, 0):
        read = Mock(return_value=part(content, offset))
        client: Any = SimpleNamespace(endpoints=SimpleNamespace(ReadReplicaLog=read))
        tail = logs._Tail(client, NAME, len(content) - 1)
        assert tail.read(patiently=False) == (shown if offset else content)
        assert read.call_args.args[0].max_bytes == len(content)
        assert (f"earlier output of {NAME} is left out" in capsys.readouterr().err) == bool(offset)


@pytest.mark.parametrize(("lines", "shown"), [(2, b"b\nc"), (9, b"a\nb\nc"), (0, b"")])
def test_the_last_lines_are_those_of_the_first_read(lines: int, shown: bytes) -> None:
    answers = [part(b"a\nb\nc", 0), part(b"d\ne\nf\n", 5)]
    client: Any = SimpleNamespace(endpoints=SimpleNamespace(ReadReplicaLog=lambda _: answers.pop(0)))
    tail = logs._Tail(client, NAME, 100, lines)
    assert [tail.read(patiently=False) for _ in range(2)] == [shown, b"d\ne\nf\n"]
