"""Types of options that several commands share."""

from typing import Annotated

import typer

from gpuscale.cli.quantities import parse_duration, parse_size


def size(text: str) -> int:
    """A size, in bytes; a usage error where it is none."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def duration(text: str | float) -> float:
    """A duration, in seconds; a usage error where it is none. A default (typer passes it too) is one already."""
    try:
        return parse_duration(text) if isinstance(text, str) else text
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


Name = Annotated[str, typer.Argument(metavar="NAME", show_default=False)]
Names = Annotated[list[str] | None, typer.Argument(metavar="NAME", show_default=False)]
