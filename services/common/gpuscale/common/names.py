"""Ids and resource names (AIP-122): `nodes/{node}/gpus/{gpu}` and the like.

A pattern is literal segments and `{variable}` segments; each variable stands for one id. An id is 1-63 characters of
a-z, 0-9, '-', '.' and '_' that begins and ends with a letter or digit (`TEXT_FORMAT_ID` of the contract).
"""

import hashlib
import re
from functools import lru_cache
from typing import Protocol

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
BUDGET, CHANGE = "budgets/{budget}", "changes/{change}"
LEASE_KEY = "gpuscale-lease-token"
"""The metadata in which a lease token stands for a caller."""
PATTERNS = {
    "Node": NODE,
    "Gpu": GPU,
    "Reservation": RESERVATION,
    "Endpoint": ENDPOINT,
    "Replica": REPLICA,
    "Rule": RULE,
    "Decision": DECISION,
    "Watcher": WATCHER,
    "Adapter": ADAPTER,
    "Preset": PRESET,
    "Backtest": BACKTEST,
    "Booking": BOOKING,
    "Recording": RECORDING,
    "HealthEvent": HEALTH_EVENT,
    "JoinToken": JOINING,
    "Policy": POLICY,
    "Act": ACT,
    "Target": TARGET,
    "Notification": NOTIFICATION,
    "Budget": BUDGET,
    "Change": CHANGE,
}
"""The pattern of each type of resource that has one alone, of ids, by the last part of its google.api.resource type."""

MAX_ID_LENGTH = 63
_ID = r"[a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?"
ID_PATTERN = re.compile(_ID)
_NOT_OF_AN_ID = re.compile(r"[^a-z0-9._-]+")
_VARIABLE = re.compile(r"\\\{([a-z_]+)\\\}")
_DIGEST_LENGTH = 8


@lru_cache(maxsize=64)
def expression(pattern: str) -> re.Pattern[str]:
    """What the whole of a name of the pattern matches; the groups are its ids, by variable."""
    return re.compile(_VARIABLE.sub(rf"(?P<\1>{_ID})", re.escape(pattern)))


def match(pattern: str, name: str) -> dict[str, str] | None:
    """The ids in `name`, by variable of `pattern`; None if the name does not match."""
    found = expression(pattern).fullmatch(name)
    return found.groupdict() if found else None


def parse(pattern: str, name: str, field: str = "name") -> dict[str, str]:
    """Like `match`, for a name that must match; `field` is the request field that held it.

    Raises:
        InvalidArgumentError: the name is not of that pattern.
    """
    ids = match(pattern, name)
    if ids is None:
        raise InvalidArgumentError(f"{field} {misfit(pattern, name)}", field=field)
    return ids


def id_of(pattern: str, text: str, field: str = "name") -> str:
    """The id in a name of a pattern with one variable, or in place of the name, as clients of 0.x send it.

    Raises:
        InvalidArgumentError: the text is neither; `field` is the request field that held it.
    """
    return text if is_id(text) else next(iter(parse(pattern, text, field).values()))


def short_holder(holder: str) -> str:
    """`jobs/r1` of a replica's name, which commands accept; any other holder as it is."""
    return "/".join(holder.split("/")[1::2]) if match(REPLICA, holder) else holder


def misfit(pattern: str, name: str) -> str:
    """What is wrong with a name that does not match a pattern, in words."""
    in_lower_case = ", in lower case" if match(pattern, name.lower()) is not None else ""
    return f"must look like {pattern}{in_lower_case}"


def is_id(text: str) -> bool:
    """Whether the text is an id."""
    return ID_PATTERN.fullmatch(text) is not None


def to_id(text: str) -> str:
    """An id for any text, such as a host name.

    Text that is an id but for its case is only lower-cased. Any other text loses what an id cannot hold and gets the
    first eight digits of its SHA-256, so that two texts do not end up as one id.
    """
    lowered = text.lower()
    if is_id(lowered):
        return lowered
    digest = hashlib.sha256(lowered.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGEST_LENGTH]
    kept = _NOT_OF_AN_ID.sub("-", lowered)[: MAX_ID_LENGTH - _DIGEST_LENGTH - 1].strip("-._")
    return f"{kept}-{digest}" if kept else digest


def node_name(node: str) -> str:
    """`nodes/{node}`."""
    return f"nodes/{node}"


def gpu_name(node: str, uuid: str) -> str:
    """`nodes/{node}/gpus/{gpu}`, where the GPU's id is its UUID in lower case."""
    return f"nodes/{node}/gpus/{to_id(uuid)}"


class HasNode(Protocol):
    """A reserved GPU, as the contract has it."""

    @property
    def node(self) -> str:
        """Its id alone."""
        ...

    @property
    def node_name(self) -> str:
        """`nodes/{node}`; empty from allocators of before 1.0."""
        ...


def node_of(gpu: HasNode) -> str:
    """Id of the node of a reserved GPU, from allocators of before 1.0 too."""
    return (gpu.node_name or gpu.node).removeprefix("nodes/")


def reservation_name(reservation: str) -> str:
    """`reservations/{reservation}`."""
    return f"reservations/{reservation}"


def endpoint_name(endpoint: str) -> str:
    """`endpoints/{endpoint}`."""
    return f"endpoints/{endpoint}"


def replica_name(endpoint: str, replica: str) -> str:
    """`endpoints/{endpoint}/replicas/{replica}`."""
    return f"endpoints/{endpoint}/replicas/{replica}"


def rule_name(endpoint: str, rule: str) -> str:
    """`endpoints/{endpoint}/rules/{rule}`."""
    return f"endpoints/{endpoint}/rules/{rule}"


def decision_name(endpoint: str, decision: str) -> str:
    """`endpoints/{endpoint}/decisions/{decision}`."""
    return f"endpoints/{endpoint}/decisions/{decision}"


def watcher_name(watcher: str) -> str:
    """`watchers/{watcher}`."""
    return f"watchers/{watcher}"


def adapter_name(adapter: str) -> str:
    """`adapters/{adapter}`."""
    return f"adapters/{adapter}"


def quota_name(tenant: str) -> str:
    """`quotas/{tenant}`, where the tenant is any word."""
    return f"quotas/{tenant}"


def booking_name(booking: str) -> str:
    """`bookings/{booking}`."""
    return f"bookings/{booking}"


def cordon_name(target: str) -> str:
    """The name of the cordon of a node or GPU: `nodes/{node}/cordon` or `nodes/{node}/gpus/{gpu}/cordon`."""
    return f"{target}/cordon"


def cordoned(name: str) -> str:
    """The node or GPU of the name of a cordon; other names unchanged."""
    return name.removesuffix("/cordon") if name.count("/") in {2, 4} else name


def preset_name(preset: str) -> str:
    """`presets/{preset}`."""
    return f"presets/{preset}"
