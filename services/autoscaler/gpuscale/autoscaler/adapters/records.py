"""What an adapter writes down of a replica. Pure; `journal` keeps it."""

from dataclasses import dataclass
from enum import StrEnum

from gpuscale.autoscaler.adapters.health import Probe


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process of the current boot."""

    pid: int
    start_ticks: int


class Phase(StrEnum):
    """How far a replica has come."""

    INTENT = "intent"
    """It is about to be started, or was."""
    RUNNING = "running"
    """It was started; its process is known."""
    ENDED = "ended"
    """It has ended, or will never be started."""


@dataclass(frozen=True, slots=True)
class Record:
    """One replica in the journal.

    Attributes:
        replica: endpoints/{endpoint}/replicas/{replica}.
        phase: how far it has come.
        boot_id: the boot in which it was started.
        process: its main process, once known.
        asked_to_stop_at: seconds since boot when it was sent SIGTERM; None if it was not.
        failed: whether it ended by itself or could not be started; of one that ended.
        exit_code: negative for the signal that ended it; None where unknown.
        reason: why it ended as it did; may be empty.
        probe: how it is asked whether it is well; None where it counts as ready once it lives.
        ready: whether its probe has succeeded before.
    """

    replica: str
    phase: Phase
    boot_id: str
    process: ProcessId | None = None
    asked_to_stop_at: float | None = None
    failed: bool = False
    exit_code: int | None = None
    reason: str = ""
    probe: Probe | None = None
    ready: bool = False
