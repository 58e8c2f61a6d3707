"""XID numbers: what each means for the GPU, as data. Pure.

The meaning of the numbers follows NVIDIA's public catalogue of XID errors (docs.nvidia.com/deploy/xid-errors); names and
judgement are ours. A fault is fatal where the catalogue asks for a reset, a reboot or a replacement before the GPU can
be used again. A fault of a program (a bad address, an illegal instruction) says nothing against the GPU.
"""

from collections.abc import Mapping
from typing import NamedTuple

from gpuscale.monitor.model.health import Finding, HealthAction, HealthSeverity


class Xid(NamedTuple):
    """One number: what happened, how bad it is, what to do, and whether the GPU is unusable until that is done."""

    name: str
    severity: HealthSeverity
    action: HealthAction
    fatal: bool = False


_INFO, _WARNING, _CRITICAL = HealthSeverity.INFO, HealthSeverity.WARNING, HealthSeverity.CRITICAL

XIDS: Mapping[int, Xid] = {
    8: Xid("a channel made no progress", _WARNING, HealthAction.RESTART_WORKLOAD),
    13: Xid("a program caused a graphics engine exception", _WARNING, HealthAction.RESTART_WORKLOAD),
    31: Xid("a program accessed memory that it has not", _WARNING, HealthAction.RESTART_WORKLOAD),
    32: Xid("a stream of commands was corrupt", _WARNING, HealthAction.RESTART_WORKLOAD),
    38: Xid("the driver's firmware failed", _CRITICAL, HealthAction.RESET_GPU, fatal=True),
    43: Xid("a program's channel was reset", _INFO, HealthAction.RESTART_WORKLOAD),
    45: Xid("a program's channels were removed before it ended", _INFO, HealthAction.NONE),
    46: Xid("the GPU stopped processing", _CRITICAL, HealthAction.RESET_GPU, fatal=True),
    48: Xid("a memory error could not be corrected", _CRITICAL, HealthAction.RESET_GPU, fatal=True),
    54: Xid("auxiliary power is not connected", _CRITICAL, HealthAction.CHECK_HARDWARE, fatal=True),
    61: Xid("the power controller's firmware stopped", _CRITICAL, HealthAction.RESET_GPU, fatal=True),
    62: Xid("the power controller halted", _CRITICAL, HealthAction.RESET_GPU, fatal=True),
    63: Xid("memory with errors was noted for replacement", _WARNING, HealthAction.DRAIN),
    64: Xid(
        "memory with errors could not be noted for replacement", _CRITICAL, HealthAction.RESET_GPU, fatal=True
    ),
    66: Xid("a program made an illegal access of the driver", _WARNING, HealthAction.RESTART_WORKLOAD),
    68: Xid("the video processor failed", _WARNING, HealthAction.RESTART_WORKLOAD),
    69: Xid("a program caused an exception of the engine's class", _WARNING, HealthAction.RESTART_WORKLOAD),
    74: Xid("an NVLink failed", _CRITICAL, HealthAction.RESET_GPU, fatal=True),
    78: Xid("a virtual GPU could not be started", _WARNING, HealthAction.RESTART_WORKLOAD),
    79: Xid("the GPU fell off the bus", _CRITICAL, HealthAction.REBOOT_NODE, fatal=True),
    92: Xid("memory errors that are corrected come too often", _WARNING, HealthAction.DRAIN),
    94: Xid("a memory error was contained to one program", _WARNING, HealthAction.RESTART_WORKLOAD),
    95: Xid("a memory error was not contained", _CRITICAL, HealthAction.RESET_GPU, fatal=True),
    109: Xid("switching between programs timed out", _CRITICAL, HealthAction.RESET_GPU, fatal=True),
    110: Xid("a security fault", _CRITICAL, HealthAction.REBOOT_NODE, fatal=True),
    119: Xid("the system processor did not answer", _CRITICAL, HealthAction.RESET_GPU, fatal=True),
    120: Xid("the system processor failed", _CRITICAL, HealthAction.RESET_GPU, fatal=True),
    121: Xid("the link to the CPU saw an error that was corrected", _INFO, HealthAction.NONE),
    122: Xid("the power controller could not read its memory", _WARNING, HealthAction.CONTACT_SUPPORT),
    123: Xid("the power controller could not write its memory", _WARNING, HealthAction.RESET_GPU),
    136: Xid("training of a link failed", _CRITICAL, HealthAction.RESET_GPU, fatal=True),
    140: Xid("memory has an error that was not recovered", _CRITICAL, HealthAction.RESET_GPU, fatal=True),
    143: Xid("the GPU could not be initialized", _CRITICAL, HealthAction.RESET_GPU, fatal=True),
    144: Xid("an NVLink saw a fault of its serializer", _CRITICAL, HealthAction.RESET_GPU, fatal=True),
    145: Xid("an NVLink saw a fault of its link layer", _CRITICAL, HealthAction.RESET_GPU, fatal=True),
    149: Xid("an NVLink failed to come up", _CRITICAL, HealthAction.RESET_GPU, fatal=True),
    154: Xid("the driver changed what the GPU needs to recover", _WARNING, HealthAction.DRAIN),
    155: Xid("an NVLink went down", _WARNING, HealthAction.DRAIN),
    156: Xid("memory of a link was retired", _WARNING, HealthAction.DRAIN),
}
"""What is known of each number."""

_UNKNOWN = Xid(
    "a fault that this version does not know", HealthSeverity.WARNING, HealthAction.CONTACT_SUPPORT
)


def xid_finding(xid: int) -> Finding:
    """What a fault with that number means."""
    known = XIDS.get(xid, _UNKNOWN)
    return Finding(known.severity, known.action, f"XID {xid}: {known.name}", known.fatal)
