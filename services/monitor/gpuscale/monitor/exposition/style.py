"""How series are named. Pure."""

from dataclasses import dataclass
from typing import Literal

Names = Literal["all", "dcgm", "gpuscale"]
HostLabel = Literal["hostname", "Hostname"]


@dataclass(frozen=True, slots=True)
class Style:
    """How series are named.

    Attributes:
        names: which names the readings of GPUs have.
        host_label: how DCGM's host label is written.
        many_nodes: whether the page shows several nodes: series of DCGM then have a label `node` more.
    """

    names: Names = "all"
    host_label: HostLabel = "hostname"
    many_nodes: bool = False
