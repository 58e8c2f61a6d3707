"""Whether a node can be counted on, by the age of its last snapshot and by its stream. Pure: `now` is an argument."""

from gpuscale.monitor.model.nodes import NodeState, Sample

STALE_PERIODS = 3


def stale_at(sample: Sample) -> float:
    """When a snapshot is three periods old: until then it counts."""
    return sample.sampled_at + STALE_PERIODS * sample.period


def is_stale(sample: Sample | None, now: float) -> bool:
    """Whether there is no snapshot that is at most three periods old."""
    return sample is None or now > stale_at(sample)


def node_state(sample: Sample | None, *, streaming: bool, now: float) -> NodeState:
    """The state of a node whose agent's stream is open or not."""
    if not streaming:
        return NodeState.OFFLINE
    return NodeState.STALE if is_stale(sample, now) else NodeState.ONLINE


def is_gone(sample: Sample | None, *, streaming: bool, now: float) -> bool:
    """Whether a node is given up: its stream is closed, and its last snapshot is stale as well.

    A node that is gone holds nothing: an agent that says it started earlier may take its name, and another node may
    report its GPUs (a host that was renamed).
    """
    return not streaming and is_stale(sample, now)
