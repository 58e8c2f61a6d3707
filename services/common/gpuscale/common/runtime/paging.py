"""Pages of a list (AIP-158).

The token holds the key of the last item sent, so that a page does not depend on how many items came or went before it.
It carries a checksum against mistakes; it holds no secret and grants nothing, so it is not signed.
"""

import base64
import binascii
import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

from gpuscale.common.errors import InvalidArgumentError

DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000
_CHECKSUM_BYTES = 6

T = TypeVar("T")


def page(
    items: Sequence[T],
    *,
    key: Callable[[T], str],
    page_size: int,
    page_token: str,
    descending: bool = False,
) -> tuple[list[T], str]:
    """The items after `page_token`, and the token of the page that follows ("" on the last page).

    Args:
        items: sorted by `key`, from the largest down if `descending`; the keys differ from each other.
        key: what the items are sorted by.
        page_size: 0 means 100; more than 1000 means 1000.
        page_token: "" for the first page, else what the page before returned.
        descending: whether the largest key comes first.

    Raises:
        InvalidArgumentError: a negative size, or a token that this function did not make for this direction.
    """
    size = page_limit(page_size)
    start = _start(items, key, _decode(page_token, descending), descending) if page_token else 0
    end = start + size
    token = _encode(key(items[end - 1]), descending) if end < len(items) else ""
    return list(items[start:end]), token


def page_limit(page_size: int) -> int:
    """How many items a page has at most.

    Raises:
        InvalidArgumentError: a negative size.
    """
    if page_size < 0:
        raise InvalidArgumentError("page_size must not be negative", field="page_size")
    return min(page_size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)


def last_key(page_token: str, *, descending: bool = False) -> str:
    """The key of the last item before a page, for a list that is read from there on; "" for the first page.

    Raises:
        InvalidArgumentError: the token is not one that `page` made for this direction.
    """
    return _decode(page_token, descending) if page_token else ""


def _start(items: Sequence[T], key: Callable[[T], str], last: str, descending: bool) -> int:
    """Index of the first item beyond the key `last`; bisection, since `bisect` knows no descending order."""
    low, high = 0, len(items)
    while low < high:
        middle = (low + high) // 2
        found = key(items[middle])
        if found >= last if descending else found <= last:
            low = middle + 1
        else:
            high = middle
    return low


def _encode(last: str, descending: bool) -> str:
    payload = last.encode()
    checksum = hashlib.sha256((b"page>" if descending else b"page<") + payload).digest()[:_CHECKSUM_BYTES]
    return base64.urlsafe_b64encode(checksum + payload).decode().rstrip("=")


def _decode(token: str, descending: bool) -> str:
    try:
        raw = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
        last = raw[_CHECKSUM_BYTES:].decode()
    except (binascii.Error, ValueError):
        raise _forged() from None
    if _encode(last, descending) != token:
        raise _forged()
    return last


def _forged() -> InvalidArgumentError:
    return InvalidArgumentError("page_token is not one that a page of this list returned", field="page_token")
