"""A caller that one process of a service vouches for towards another: what a standby tells the leader of each call.

Both use one database. The leader writes a secret into it for each term, and whoever can read that can do everything already.
The standby names the caller as it recognised it, with an HMAC of that, the method and the epoch; the secret is never sent.
"""

import hmac
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from gpuscale.common.errors import UnauthenticatedError
from gpuscale.common.security.auth import Limits, Principal, Role

MOST_BYTES: Final = 8_192
"""Size of what names a caller; metadata of a call have 16 KiB in all."""


def seal(epoch: int, secret: str, path: str, caller: Principal) -> str:
    """The metadata that name a caller of a method; longer than `MOST_BYTES` where its limits are very long."""
    text = json.dumps(asdict(caller), separators=(",", ":"))
    return f"{epoch} {_code(epoch, secret, path, text)} {text}"


def unseal(epoch: int, secret: str, path: str, values: Sequence[str | bytes]) -> Principal | None:
    """Whom the metadata of a call name; None where they are of another term than `epoch`.

    Raises:
        UnauthenticatedError: they prove nothing (reason NOT_A_GATEWAY).
    """
    value = values[0] if len(values) == 1 else ""
    term, code, text = (*str(value).split(" ", 2), "", "", "")[:3]
    if term.isdecimal() and term != str(epoch):
        return None
    if not hmac.compare_digest(code.encode(), _code(epoch, secret, path, text).encode()):
        raise UnauthenticatedError(
            "only another process on the same database may call for others here", reason="NOT_A_GATEWAY"
        )
    said: dict[str, Any] = json.loads(text)
    said["role"] = Role(said["role"])
    said["limits"] = Limits(tuple(said["limits"]["tenants"]), said["limits"]["max_priority"])
    return Principal(**said)


def _code(epoch: int, secret: str, path: str, text: str) -> str:
    return hmac.digest(secret.encode(), f"{epoch} {path} {text}".encode(), "sha256").hex()
