"""Options that several commands share, written once: a class of options stands for all of its fields.

Typer reads a command's options from the signature of its function. `takes` gives a function that has a parameter of a
dataclass the fields of that class as parameters instead.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

Command = Callable[..., None]


def takes(name: str, kind: type[Any]) -> Callable[[Command], Command]:
    """A decorator: the command gets the fields of the dataclass `kind` as options, and the object under `name`."""
    fields = inspect.signature(kind).parameters

    def decorate(command: Command) -> Command:
        own = inspect.signature(command).parameters
        parameters = [*fields.values(), *(one for key, one in own.items() if key != name)]

        @wraps(command)
        def run(**typed: Any) -> None:
            command(**{name: kind(**{key: typed.pop(key) for key in fields})}, **typed)

        signature = inspect.Signature([one.replace(kind=one.KEYWORD_ONLY) for one in parameters])
        run.__dict__["__signature__"] = signature
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        return run

    return decorate
