"""Checks that need to know what was before: of counters that grow, and of links that were up. Pure."""

from dataclasses import dataclass

from gpuscale.monitor.health.checks import AWAY, Results
from gpuscale.monitor.model.health import Action, Finding, GpuFacts, HealthCheck, HealthSeverity

REPLAY_WINDOW_SECONDS = 60.0
MOST_REPLAYS_PER_MINUTE = 30


@dataclass(slots=True)
class Past:
    """What was seen of one GPU before."""

    replays: int | None = None
    replays_at: float = 0.0
    most_links: int = 0


def past_results(past: Past, facts: GpuFacts, now: float) -> Results:
    """What the facts say in the light of the past, which is brought up to date.

    A GPU that was away begins anew: its counters do, and its links may have been wired in another way.
    """
    if facts.state in AWAY:
        past.replays, past.most_links = None, 0
        return {}
    found: Results = {}
    if facts.pcie_replays is not None:
        found |= _replays(past, facts.pcie_replays, now)
    if facts.nvlinks_active is not None:
        past.most_links = max(past.most_links, facts.nvlinks_active)
        down = past.most_links - facts.nvlinks_active
        message = f"{down} of {past.most_links} NVLinks that were up are down"
        finding = Finding(HealthSeverity.WARNING, Action.RESET_GPU, message)
        found[HealthCheck.NVLINK_DOWN] = finding if down else None
    return found


def _replays(past: Past, replays: int, now: float) -> Results:
    """How fast the counter grew in the last window; nothing while the window runs."""
    if past.replays is None or replays < past.replays:
        past.replays, past.replays_at = replays, now
    if now - past.replays_at < REPLAY_WINDOW_SECONDS:
        return {}
    per_minute = (replays - past.replays) * 60.0 / (now - past.replays_at)
    past.replays, past.replays_at = replays, now
    message = f"{per_minute:.0f} PCIe packets a minute have to be sent again"
    finding = Finding(HealthSeverity.WARNING, Action.CHECK_HARDWARE, message)
    return {HealthCheck.PCIE_REPLAY: finding if per_minute > MOST_REPLAYS_PER_MINUTE else None}
