"""Fields of the contract by the names that people type: a wrong one is named, and the right one offered."""

import difflib
from collections.abc import Iterable
from typing import Any

from gpuscale.cli.grammar.jsonpath import Field, Path
from gpuscale.common.errors import InvalidArgumentError


def near(typed: str, known: Iterable[str]) -> str:
    """`; did you mean x?` for the known word that is nearest; else what there is; nothing where there is nothing."""
    words = list(known)
    folded = {word.casefold(): word for word in words}
    found = difflib.get_close_matches(typed.casefold(), list(folded), n=1)
    if found:
        return f"; did you mean {folded[found[0]]}?"
    return f"; there are {', '.join(words)}" if words else ""


def check(path: Path, descriptor: Any, where: str, also: Iterable[str] = ()) -> None:
    """Check that a path leads through fields of a message; maps may have any key.

    Args:
        path: the path.
        descriptor: of the message; to the stubs one of two classes, by implementation.
        where: the option that the path stands in, for the complaint.
        also: further words that could have been meant.

    Raises:
        InvalidArgumentError: there is no such field.
    """
    for step in path:
        if descriptor is None or not isinstance(step, Field):
            continue
        found = next((one for one in descriptor.fields if step.name in {one.name, one.json_name}), None)
        if found is None:
            known = [*also, *(one.json_name for one in descriptor.fields)]
            raise InvalidArgumentError(f"{where}: there is no {step.name!r}{near(step.name, known)}")
        also = ()
        of = found.message_type
        descriptor = None if of is None or of.GetOptions().map_entry else of
