"""Values: dataclasses that nobody changes, made at the price of plain ones. Pure.

A frozen dataclass sets each of its fields through `object.__setattr__`, which takes four times as long as an assignment; a
reservation has 22 fields and is made anew for each state of its life. So these are frozen to type checkers, which read
every line that could change one, and plain dataclasses with a hash when the program runs.
"""

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from dataclasses import dataclass as value
else:
    from collections.abc import Callable
    from dataclasses import dataclass

    T = TypeVar("T")

    def value(*, frozen: bool, slots: bool) -> Callable[[type[T]], type[T]]:
        """Make a dataclass that compares and hashes by its fields; to be called as if it were frozen."""
        return dataclass(slots=slots, unsafe_hash=frozen)


__all__ = ["value"]
