"""Global options anywhere, nouns under any of their names, resource names that say their noun."""

import pytest
import typer

from gpuscale.cli import main
from gpuscale.cli.arguments import GLOBAL_OPTIONS, NOUNS, normalise

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
    assert all(normalise(["get", name]) == ["get", plural] for name in noun)


def test_the_table_of_global_options_is_what_the_program_declares() -> None:
    declared = {
        name: not parameter.is_flag
        for parameter in typer.main.get_command(main.app).params
        for name in parameter.opts
        if not ENDS_THE_PROGRAM & set(parameter.opts)
    }
    assert declared == dict(GLOBAL_OPTIONS)
