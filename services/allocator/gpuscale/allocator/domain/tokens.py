"""Tokens of a key that the state keeps: proofs of leases, and places in a list. Pure.

The key stays the same for a call that is repeated, after a restart and on a standby that took over, and nothing is stored
for each grant or page.
"""

import binascii
import hmac
from base64 import b64decode, urlsafe_b64encode
from collections.abc import Sequence

from gpuscale.allocator.domain.model import Reservation
from gpuscale.common.errors import InvalidArgumentError

KEY_PARTS = 4
"""The key is kept as so many numbers of 63 bits."""
_HALF = 8


class Tokens:
    """Makes the tokens of one key, and knows them again.

    Args:
        key: `KEY_PARTS` random numbers.
    """

    def __init__(self, key: Sequence[int]) -> None:
        self._key = b"".join(part.to_bytes(8, "big") for part in key)

    def of_lease(self, reservation: Reservation) -> str:
        """The lease token of a reservation: 43 characters of HMAC-SHA256 (RFC 2104) over its id and fence."""
        return _text(self._digest(f"{reservation.id} {reservation.fence}".encode()))

    def proves(self, token: str, reservation: Reservation) -> bool:
        """Whether a token is the lease token of a reservation; the time that this takes tells nothing of it."""
        return hmac.compare_digest(token.encode(), self.of_lease(reservation).encode())

    def of_page(self, fence: int) -> str:
        """The token of the page after the reservation with this fence, which it hides."""
        body = fence.to_bytes(_HALF, "big")
        mark = self._digest(b"page" + body)[:_HALF]
        return _text(mark + self._masked(mark, body))

    def fence_of_page(self, token: str) -> int:
        """The fence that `of_page` hid.

        Raises:
            InvalidArgumentError: the token is not one that a page returned.
        """
        try:
            raw = b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            raw = b""
        fence = int.from_bytes(self._masked(raw[:_HALF], raw[_HALF:]), "big") if len(raw) == 2 * _HALF else 0
        if not hmac.compare_digest(self.of_page(fence).encode(), token.encode()):
            raise InvalidArgumentError(
                "page_token is not one that a page of this list returned", field="page_token"
            )
        return fence

    def _masked(self, mark: bytes, body: bytes) -> bytes:
        """The body hidden, or shown again, by a mask that depends on the mark."""
        return bytes(one ^ other for one, other in zip(body, self._digest(b"mask" + mark), strict=False))

    def _digest(self, message: bytes) -> bytes:
        return hmac.digest(self._key, message, "sha256")


def _text(raw: bytes) -> str:
    return urlsafe_b64encode(raw).decode().rstrip("=")
