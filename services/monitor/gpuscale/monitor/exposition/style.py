"""How series are named. Pure."""

from dataclasses import dataclass
from typing import Literal

Names = Literal["checked", "all", "dcgm", "gpuscale"]
HostLabel = Literal["hostname", "Hostname"]


@dataclass(frozen=True, slots=True)
class Style:
    """How series are named.

    Attributes:
        names: which names the readings of GPUs have: our own and DCGM's as far as `promtool check metrics` has no
            complaint, both to the letter, DCGM's, or our own.
        host_label: how DCGM's host label is written.
        many_nodes: whether the page shows several nodes: series of DCGM then have a label `node` more.
    """

    names: Names = "checked"
    host_label: HostLabel = "hostname"
    many_nodes: bool = False
