"""Nouns under all their names, resource names that say their noun, and options of all commands anywhere."""

import re

import click
import pytest

from gpuscale.cli.commands.watching import GetGroup
from gpuscale.cli.console.command import typed_anywhere
from gpuscale.cli.console.errors import ExitCode, report_os
from gpuscale.cli.grammar.nouns import NOUNS, format_of, is_field, with_noun
from gpuscale.cli.main import COMMANDS, OF_OTHER_TOOLS, root, run_command


def parsed(line: str) -> tuple[str, dict[str, object], dict[str, object]]:
    """(the command, what it gets, the options that may stand anywhere) of a line."""
    context = root().make_context("gpuscalectl", line.split())
    while isinstance(context.command, click.Group):
        left = [*context._protected_args, *context.args]
        name, command, left = context.command.resolve_command(context, left)
        context = command.make_context(name, left, parent=context)
    typed = {name: value for name, value in context.params.items() if value not in (None, False, "", (), 0)}
    return context.command_path.removeprefix("gpuscalectl "), typed, typed_anywhere(context)


@pytest.mark.parametrize(
    ("typed", "command", "names", "anywhere"),
    [
        ("get ep jobs --address h:1", "get endpoints", ("jobs",), {"address": "h:1"}),
        ("--address h:1 get nodes", "get nodes", None, {"address": "h:1"}),
        ("get --no-headers rsv --ascii", "get reservations", None, {"no_headers": True, "ascii": True}),
        ("delete endpoints/jobs -y", "delete endpoint", ("endpoints/jobs",), {}),
        ("explain endpoints/a/decisions/b", "explain decision", "endpoints/a/decisions/b", {}),
        ("get watchers/q", "get watchers", ("watchers/q",), {}),
        ("scale ep jobs --replicas 3", "scale endpoint", "jobs", {}),
        ("get ep -w jobs --sort-by LEFT", "get endpoints", ("jobs",), {"watch": True, "sort_by": "LEFT"}),
        ("get -w --sort-by LEFT ep jobs", "get endpoints", ("jobs",), {"watch": True, "sort_by": "LEFT"}),
        ("get rsv -- -o json", "get reservations", ("-o", "json"), {}),
        ("explain exit-codes", "explain exit-codes", None, {}),
        ("cordon host-1 -v", "cordon", ("host-1",), {"verbose": True}),
        ("--ascii run --gpus 1 -v -- ls -o x", "run", None, {"ascii": True, "verbose": True}),
    ],
)
def test_a_line_leads_to_one_command(
    typed: str, command: str, names: object, anywhere: dict[str, object]
) -> None:
    found, got, options = parsed(typed)
    assert (found, got.get("name"), options) == (command, names, anywhere)


def test_the_option_furthest_right_counts() -> None:
    assert parsed("--address a:1 get --address b:1 nodes --address c:1")[2] == {"address": "c:1"}


def test_up_reads_its_own_arguments() -> None:
    context = root().make_context("gpuscalectl", ["up", "--config", "x", "--address", "y", "-o", "z"])
    _, up, left = root().resolve_command(context, [*context._protected_args, *context.args])
    assert up.make_context("up", left, parent=context).args == ["--config", "x", "--address", "y", "-o", "z"]


@pytest.mark.parametrize("noun", NOUNS)
def test_every_name_of_a_noun_is_one_command(noun: tuple[str, ...]) -> None:
    assert all(with_noun([name, "x"], {noun[1]}) == [noun[1], "x"] for name in noun[1:] if name)


@pytest.mark.parametrize("words", [["bogus"], ["a/b"], []])
def test_other_words_stay(words: list[str]) -> None:
    assert with_noun(words, {"nodes"}) == words


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["endpoint.spec"], True), (["Ask"], True), (["endpoint"], True), (["endpoint", "jobs"], False),
        (["endpoints/jobs"], False), (["exit-codes"], False),
    ],
)  # fmt: skip
def test_explain_knows_a_field_from_a_name(words: list[str], *, field: bool) -> None:
    assert is_field(words) is field


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("get nodes -o json", "json"),
        ("-ojsonl get nodes", "jsonl"),
        ("get nodes --output=yaml", "yaml"),
        ("get nodes", ""),
        ("get nodes -o", ""),
        ("run -- ls -o json", ""),
    ],
)
def test_the_format_is_known_before_anything_else_is(typed: str, wanted: str) -> None:
    assert format_of(typed.split()) == wanted


@pytest.mark.parametrize(
    "typed",
    [*OF_OTHER_TOOLS, *(f"get {one}" for one in GetGroup.of_other_tools), "delete rsv r1", "delete job/r1"],
)
def test_words_of_other_programs_lead_to_commands_that_exist(
    typed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed not in COMMANDS
    assert run_command([*typed.split(), "x"]) == ExitCode.USAGE
    hint = capsys.readouterr().err.splitlines()[-1].partition("; try: ")[2]
    assert hint
    for said in re.split(r", then | \(or ", hint.removeprefix("gpuscalectl ").rstrip(")")):
        words = (
            said.partition(" -- ")[0].replace("TYPE NAME", "endpoint NAME").replace("TYPE", "nodes").split()
        )
        assert run_command([*words, "--help"]) == ExitCode.OK, said
        shown = capsys.readouterr().out
        assert all(option in shown for option in words[1:] if option.startswith("-")), said


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("reserve 2", "unexpected extra argument (2); did you mean --gpus 2?"),
        ("get gpus -A", "No such option '-A'; there are no namespaces: leave it out"),
        ("reserve --count 2", "No such option '--count'; try: --gpus"),
        ("run --gres=gpu:2 true", "No such option '--gres'; try: --gpus"),
        ("reserve --gpus 2 --mem 20GB", "'--mem'; try: --min-memory"),
        ("reserve --gpus two", "'two' is not a valid number."),
        ("reserve --gpus 2 --min-memory 20", "20 would be bytes; write 20GiB"),
        ("run --gpus 1 --time-limit 2.5 -- true", "'2.5' has no unit: write 2.5m or 2.5s"),
        ("top nodes", "unexpected extra argument (nodes); try: gpuscalectl get nodes"),
        ("scale --replicas=3 endpoint/chat", "'--replicas'; options of a command come after its name"),
        ("--adress localhost:7070 status", "No such option '--adress'; did you mean --address?"),
        ("top 4", "unexpected extra argument (4)"),
        ("reserve --gpus 1 --for 2h", "--for, --name and --title are of a booking: pass --at too"),
        ("reserve --gpus 1 --at tomorrow", "pass --for too, such as --for 2h"),
        (
            "reserve --gpus 1 --at 9:00 --for 2h --wait 1h --holder me",
            "a booking has no --wait and --holder: leave them out",
        ),
        ("get nodes --cert-file a.crt", "--cert-file and --key-file need each other: pass both"),
        ("get nodes --cert-file a.crt --key-file a.key", "need --ca-file, which turns TLS on"),
        ("config set-context lab --address lab", "has no port: write HOST:PORT, such as lab:7070"),
    ],
)
def test_what_may_have_been_meant_is_said_where_it_is_known(
    typed: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(typed.split()) == ExitCode.USAGE
    assert " ".join(capsys.readouterr().err.split()).endswith(said)


@pytest.mark.parametrize("group", ["certs", "explain", "get", "token"])
def test_the_help_of_a_group_has_whole_sentences(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([group, "--help"]) == ExitCode.OK
    assert "..." not in capsys.readouterr().out.partition("Commands:")[2]


def test_who_reads_no_more_is_told_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_os(BrokenPipeError(32, "Broken pipe")) == ExitCode.OTHER
    assert capsys.readouterr().err == ""
