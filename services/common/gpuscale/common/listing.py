"""Pages of List methods, by their filter and order."""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from google.protobuf.message import Message

from gpuscale.common.filters import SortValue, compile_filter, compile_order
from gpuscale.common.wire import first_beyond, forged_token, last_key, page_limit, to_token


class ListRequest(Protocol):
    """A request of a List method."""

    page_size: int
    page_token: str
    filter: str
    order_by: str


Item = TypeVar("Item")
M = TypeVar("M", bound=Message)


def listed(
    items: Sequence[Item] | Callable[[str], Iterable[Item]],
    request: ListRequest,
    of: type[M],
    *,
    key: Callable[[Item], str],
    encode: Callable[[Item], M],
    descending: bool = False,
) -> tuple[list[M], str]:
    """The page of messages that a List method answers, and the token of the next; only what is needed is read and encoded.

    The items are sorted by `key`, from the largest down if `descending`; the keys differ from each other. Where they
    are not at hand, `items` gives those beyond a key, of which "" has all before it. `encode` makes the message of one.
    The interceptor binds the token of a request to its filter and order.

    Raises:
        InvalidArgumentError: filter, order_by, page_size or page_token is wrong.
    """
    keep, ordered = compile_filter(request.filter, of), bool(request.order_by.strip())
    order = compile_order(request.order_by, of)
    most, last = page_limit(request.page_size), last_key(request.page_token)
    try:
        seen = tuple(SortValue(value, down) for value, down in json.loads(last or "[]"))
    except (ValueError, TypeError):
        raise forged_token() from None
    after = "" if ordered or not seen else seen[0].value
    if not isinstance(after, str):
        raise forged_token()
    if callable(items):
        beyond: Iterable[Item] = items(after)
    else:
        beyond = items[first_beyond(items, key, after, descending=descending) :]
    found: list[tuple[tuple[SortValue, ...], M]] = []
    for item in beyond:
        message = encode(item)
        place = (*order(message), SortValue(key(item), descending))
        if keep(message) and (not ordered or _beyond(seen, place)):
            found.append((place, message))
        if not ordered and len(found) > most:
            break
    found.sort(key=lambda one: one[0])
    more = len(found) > most
    token = to_token(json.dumps([[rank.value, rank.down] for rank in found[most - 1][0]])) if more else ""
    return [message for _, message in found[:most]], token


def _beyond(last: tuple[SortValue, ...], place: tuple[SortValue, ...]) -> bool:
    try:
        return last < place
    except TypeError:
        raise forged_token() from None
