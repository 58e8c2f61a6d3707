"""Types of options that several commands share."""

from collections.abc import Iterable
from typing import Annotated, TypeVar

import typer

from gpuscale.cli.grammar.formats import Form, parse_form
from gpuscale.common.sizes import to_bytes, to_seconds


def size(text: str | int) -> int:
    """A size, in bytes; a usage error where it is none. A default (typer passes it too) is one already."""
    try:
        return to_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def duration(text: str | float) -> float:
    """A duration, in seconds; a usage error where it is none. A default (typer passes it too) is one already."""
    try:
        return to_seconds(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def form(text: str | Form) -> Form:
    """A format of output; a usage error where it is none. A default (typer passes it too) is one already."""
    try:
        return parse_form(text) if isinstance(text, str) else text
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def one_gpu(text: str) -> str:
    """The name of a GPU; a usage error where it is none, such as a number of them."""
    if "/" not in text:
        meant = f"did you mean --gpus {text}? " if text.isdecimal() else ""
        raise typer.BadParameter(f"{text!r} is no GPU: {meant}--gpu takes NODE/UUID")
    return text


def share(text: str | float) -> int:
    """A share of a GPU, such as 0.5, in thousandths; a usage error where it is none."""
    try:
        given = float(text)
        milli = round(given * 1000)
    except (ValueError, OverflowError) as error:
        raise typer.BadParameter(f"{text!r} is not a share; write it like 0.5") from error
    if given > 1 or milli < 1:
        raise typer.BadParameter(f"{text!r} is not between 0.001 and 1")
    return milli


def pair(text: str) -> tuple[str, str]:
    """A label, KEY=VALUE; a usage error where it is none."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise typer.BadParameter(f"{text!r} is not a label; write it like KEY=VALUE")
    return key, value


V = TypeVar("V")


def once(pairs: Iterable[tuple[str, V]]) -> dict[str, V]:
    """What was typed as NAME=VALUE, by name; a usage error where a name has two values."""
    found: dict[str, V] = {}
    for name, value in pairs:
        if found.setdefault(name, value) != value:
            raise typer.BadParameter(f"{name!r} was given twice, with different values")
    return found


Name = Annotated[str, typer.Argument(metavar="NAME", show_default=False)]
Names = Annotated[list[str] | None, typer.Argument(metavar="NAME", show_default=False)]
SomeNames = Annotated[list[str], typer.Argument(metavar="NAME", show_default=False)]
"""One at least."""
