"""Lease tokens: what proves that somebody speaks for the holder of a reservation. Pure.

A token is the HMAC-SHA256 of the reservation and its fence under a key that the state keeps (RFC 2104). So it is the same
for a call that is repeated, after a restart and on a standby that took over, and nothing is stored for each grant.
"""

import hmac
from base64 import urlsafe_b64encode
from collections.abc import Sequence
from hashlib import sha256

from gpuscale.allocator.domain.model import Reservation

KEY_PARTS = 4
"""The key is kept as so many numbers of 63 bits."""


class LeaseTokens:
    """Makes the tokens of one key, and knows them again.

    Args:
        key: `KEY_PARTS` random numbers.
    """

    def __init__(self, key: Sequence[int]) -> None:
        self._key = b"".join(part.to_bytes(8, "big") for part in key)

    def of(self, reservation: Reservation) -> str:
        """The token of a reservation: 43 characters."""
        digest = hmac.digest(self._key, f"{reservation.id} {reservation.fence}".encode(), sha256)
        return urlsafe_b64encode(digest).decode().rstrip("=")

    def proves(self, token: str, reservation: Reservation) -> bool:
        """Whether a token is the one of a reservation; how long that takes tells nothing of it."""
        return hmac.compare_digest(token.encode(), self.of(reservation).encode())
