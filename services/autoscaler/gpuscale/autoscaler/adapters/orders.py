"""What the autoscaler wants of a replica, as an adapter hears it. Pure."""

from dataclasses import dataclass
from enum import Enum

from gpuscale.autoscaler.adapters.templates import ReplicaOrder


class Goal(Enum):
    """What should become of a replica."""

    RUN = "run"
    STOP = "stop"
    FORGET = "forget"


@dataclass(frozen=True, slots=True)
class Desired:
    """What the autoscaler wants of one replica.

    Attributes:
        order: which replica, and with what it is started.
        goal: what should become of it.
        template: name of its command template.
        drain_timeout: seconds it may take to finish its work; None for ever.
    """

    order: ReplicaOrder
    goal: Goal
    template: str = ""
    drain_timeout: float | None = None
