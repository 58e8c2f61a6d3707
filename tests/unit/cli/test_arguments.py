"""Global options anywhere, nouns under any of their names, resource names that say their noun."""

import pytest
import typer

from gpuscale.cli import main
from gpuscale.cli.grammar.arguments import GET_OPTIONS, GLOBAL_OPTIONS, NOUNS, format_of, normalise

ENDS_THE_PROGRAM = {"--version", "--help", "--install-completion", "--show-completion"}


@pytest.mark.parametrize(
    ("typed", "normal"),
    [
        ("get ep jobs -o json", "-o json get endpoints jobs"),
        ("get nodes -ojson --address=h:1", "-ojson --address=h:1 get nodes"),
        ("get replicas --no-headers -e x -o name", "--no-headers -o name get replicas -e x"),
        ("delete endpoints/jobs -y", "delete endpoint endpoints/jobs -y"),
        ("explain endpoints/a/decisions/b", "explain decision endpoints/a/decisions/b"),
        ("get watchers/q", "get watchers watchers/q"),
        ("scale ep jobs --replicas 3", "scale endpoint jobs --replicas 3"),
        ("get ep -w -l zone=a jobs --sort-by LEFT", "get -w -l zone=a --sort-by LEFT endpoints jobs"),
        ("get -lzone=a res", "get -lzone=a reservations"),
        ("reserve --gpus 1 -l a=b", "reserve --gpus 1 -l a=b"),
        ("get rsv -- -o json", "get reservations -- -o json"),
        ("up --config x --output y -o z", "up --config x --output y -o z"),
        ("explain exit-codes", "explain exit-codes"),
        ("get bogus", "get bogus"),
        ("get a/b", "get a/b"),
        ("reserve --gpus 2 --address", "--address reserve --gpus 2"),
        ("get", "get"),
        ("", ""),
    ],
)
def test_normalise(typed: str, normal: str) -> None:
    assert normalise(typed.split()) == normal.split()


@pytest.mark.parametrize("noun", NOUNS)
def test_every_name_of_a_noun_is_one_command(noun: tuple[str, str, str]) -> None:
    plural = noun[0]
    assert all(normalise(["get", name]) == ["get", plural] for name in noun if name)


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("get nodes -o json", "json"),
        ("-ojsonl get nodes", "jsonl"),
        ("get nodes --output=yaml", "yaml"),
        ("--address -o get nodes", ""),
        ("get nodes", ""),
        ("get nodes -o", ""),
        ("run -- ls -o json", ""),
    ],
)
def test_the_format_is_known_before_anything_else_is(typed: str, wanted: str) -> None:
    assert format_of(typed.split()) == wanted


def declared(command: typer.core.TyperGroup | typer.core.TyperCommand) -> dict[str, bool]:
    """Its options, and whether a value follows each."""
    return {
        name: not parameter.is_flag
        for parameter in command.params
        for name in parameter.opts
        if not ENDS_THE_PROGRAM & set(parameter.opts)
    }


def test_the_tables_of_options_are_what_the_program_declares() -> None:
    root = main.root()
    assert declared(root) == dict(GLOBAL_OPTIONS)
    assert declared(root.commands["get"]) == dict(GET_OPTIONS)
