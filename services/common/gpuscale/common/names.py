"""Ids and resource names (AIP-122): `nodes/{node}/gpus/{gpu}` and the like.

A pattern consists of literal and `{variable}` segments; a variable stands for one id. An id has 1-63 characters of
a-z, 0-9, '-', '.' and '_', and begins and ends with a letter or digit (`TEXT_FORMAT_ID` in the contract).
"""

import hashlib
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from gpuscale.common.errors import InvalidArgumentError

NODE = "nodes/{node}"
GPU = "nodes/{node}/gpus/{gpu}"
RESERVATION = "reservations/{reservation}"
ENDPOINT = "endpoints/{endpoint}"
REPLICA = "endpoints/{endpoint}/replicas/{replica}"
RULE = "endpoints/{endpoint}/rules/{rule}"
DECISION = "endpoints/{endpoint}/decisions/{decision}"
WATCHER = "watchers/{watcher}"
ADAPTER = "adapters/{adapter}"
HEALTH_EVENT = "healthEvents/{health_event}"
RECORDING = "recordings/{recording}"
BOOKING = "bookings/{booking}"
JOINING = "joinTokens/{join_token}"
PRESET = "presets/{preset}"
BACKTEST = "backtests/{backtest}"
POLICY = "policies/{policy}"
ACT = "policies/{policy}/acts/{act}"
TARGET = "targets/{target}"
NOTIFICATION = "targets/{target}/notifications/{notification}"
BUDGET = "budgets/{budget}"
CHANGE = "changes/{change}"
LEASE_KEY = "gpuscale-lease-token"
"""Metadata key of a lease token, which authenticates a caller."""
PATTERNS = {
    pattern.rpartition("{")[2].rstrip("}").title().replace("_", ""): pattern
    for name, pattern in tuple(globals().items())
    if name.isupper() and pattern.endswith("}")
}
"""Pattern by the last part of the google.api.resource type, for types with a single pattern of ids."""

MAX_ID_LENGTH = 63
_ID = r"[a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?"
ID_PATTERN = re.compile(_ID)
_NOT_OF_AN_ID = re.compile(r"[^a-z0-9._-]+")
_VARIABLE = re.compile(r"\\\{([a-z_]+)\\\}")
_DIGEST_LENGTH = 8


@lru_cache(maxsize=64)
def expression(pattern: str) -> re.Pattern[str]:
    """A regular expression for names of a pattern, with a group for each variable. Use `fullmatch`."""
    return re.compile(_VARIABLE.sub(rf"(?P<\1>{_ID})", re.escape(pattern)))


def match(pattern: str, name: str) -> dict[str, str] | None:
    """The ids in `name`, by variable of `pattern`; None if the name does not match."""
    found = expression(pattern).fullmatch(name)
    return found.groupdict() if found else None


def parse(pattern: str, name: str, field: str = "name") -> dict[str, str]:
    """Like `match`, but raise InvalidArgumentError, for the request field `field`, if the name does not match."""
    ids = match(pattern, name)
    if ids is None:
        raise InvalidArgumentError(f"{field} {misfit(pattern, name)}", field=field)
    return ids


def id_of(pattern: str, text: str, field: str = "name") -> str:
    """The id in a name of a pattern with one variable, or the bare id that clients of 0.x send.

    Raises InvalidArgumentError: the text in the request field `field` is neither.
    """
    return text if is_id(text) else next(iter(parse(pattern, text, field).values()))


def short_holder(holder: str) -> str:
    """A replica's name as `jobs/r1`, which commands accept; other holders unchanged."""
    return "/".join(holder.split("/")[1::2]) if match(REPLICA, holder) else holder


def misfit(pattern: str, name: str) -> str:
    """Why a name does not match a pattern."""
    in_lower_case = ", in lower case" if match(pattern, name.lower()) is not None else ""
    return f"must look like {pattern}{in_lower_case}"


def is_id(text: str) -> bool:
    """Whether the text is an id."""
    return ID_PATTERN.fullmatch(text) is not None


def to_id(text: str) -> str:
    """An id for any text, such as a host name.

    Text that is an id except for its case is lower-cased. In other text, invalid characters are replaced and eight
    digits of its SHA-256 appended, so that different texts get different ids.
    """
    lowered = text.lower()
    if is_id(lowered):
        return lowered
    digest = hashlib.sha256(lowered.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGEST_LENGTH]
    kept = _NOT_OF_AN_ID.sub("-", lowered)[: MAX_ID_LENGTH - _DIGEST_LENGTH - 1].strip("-._")
    return f"{kept}-{digest}" if kept else digest


def _maker(pattern: str) -> Callable[[str], str]:
    """Makes names of a pattern that ends with its only variable."""
    return pattern.partition("{")[0].__add__


node_name = _maker(NODE)
reservation_name = _maker(RESERVATION)
endpoint_name = _maker(ENDPOINT)
watcher_name = _maker(WATCHER)
adapter_name = _maker(ADAPTER)
booking_name = _maker(BOOKING)
preset_name = _maker(PRESET)
quota_name = _maker("quotas/{tenant}")


def _maker_of_two(pattern: str) -> Callable[[str, str], str]:
    """Makes names of a pattern with two variables."""
    return re.sub(r"\{\w+\}", "{}", pattern).format


replica_name = _maker_of_two(REPLICA)
rule_name = _maker_of_two(RULE)
decision_name = _maker_of_two(DECISION)


@lru_cache(4096)
def gpu_name(node: str, uuid: str) -> str:
    """`nodes/{node}/gpus/{gpu}`, where the GPU's id is its UUID made an id."""
    return f"nodes/{node}/gpus/{to_id(uuid)}"


def node_of(gpu: Any) -> str:
    """Id of the node of a ReservedGpu message; `node_name` is empty from allocators before 1.0."""
    name: str = gpu.node_name or gpu.node
    return name.removeprefix("nodes/")


def cordon_name(target: str) -> str:
    """Cordon of a node or GPU: `nodes/{node}/cordon` or `nodes/{node}/gpus/{gpu}/cordon`."""
    return f"{target}/cordon"


def cordoned(name: str) -> str:
    """The node or GPU that a cordon is on; other names unchanged."""
    return name.removesuffix("/cordon") if name.count("/") in {2, 4} else name
