"""Health: what becomes an event, when it is over, and which GPUs work is kept away from."""

from dataclasses import replace

import pytest

from gpuscale.monitor.health.checks import (
    HOLDS,
    MOST_REPLAYS_PER_MINUTE,
    REPLAY_WINDOW_SECONDS,
    Event,
    Finding,
    HealthAction,
    HealthCheck,
    HealthFacts,
    HealthSeverity,
)
from gpuscale.monitor.health.events import XIDS, Events, xid_finding
from gpuscale.monitor.health.register import GONE_SECONDS, HealthRegister
from gpuscale.monitor.state.saver import event_from_text, event_to_text

OK = HealthFacts("OK", 0, False, False, False, "NONE", 0, 0, 18)  # noqa: FBT003


class Site:
    """A register, and one GPU that is seen once a second."""

    def __init__(self) -> None:
        self.register = HealthRegister(Events("run"))
        self.now = 0.0
        self.boot = "boot 1"

    def see(self, facts: HealthFacts = OK, seconds: float = 1.0) -> None:
        """Let time pass with snapshots that show these facts."""
        end = self.now + seconds
        while self.now < end:
            self.now += 1.0
            self.register.shown("alpha", self.boot, {"gpu-1"}, self.now)
            self.register.observe("alpha", {"GPU-1": facts}, self.now)

    def tick(self, seconds: float) -> None:
        """Let time pass with snapshots in which nothing changes."""
        end = self.now + seconds
        while self.now < end:
            self.now += 1.0
            self.register.tick(self.now)

    def fault(self, xid: int) -> None:
        self.register.report("alpha", "GPU-1", xid, self.now)

    @property
    def lasting(self) -> list[Event]:
        return [event for event in self.register.events.newest_first() if event.resolved_at is None]

    @property
    def all(self) -> list[Event]:
        return list(self.register.events.newest_first())

    @property
    def quarantine(self) -> str:
        found = self.register.quarantines("alpha").get("gpu-1")
        return found.reason if found else ""


@pytest.fixture
def site() -> Site:
    return Site()


def test_a_healthy_gpu_has_no_event_and_costs_no_tick(site: Site) -> None:
    site.see(OK, 200)
    assert site.all == []
    assert not site.register.eventful("alpha")


def test_gpus_that_cannot_be_read_are_an_event_of_their_node(site: Site) -> None:
    site.register.shown("alpha", site.boot, (), site.now, "NVML: Driver Not Loaded")
    site.tick(9)
    assert site.lasting == []
    site.tick(3)
    [event] = site.lasting
    assert (event.check, event.finding.message) == (HealthCheck.GPUS_UNREADABLE, "NVML: Driver Not Loaded")
    site.register.shown("alpha", site.boot, (), site.now)
    site.tick(7)
    assert site.lasting == []


def test_a_silent_node_is_an_event_of_the_node_that_quarantines_nobody(site: Site) -> None:
    for second in range(4):
        site.register.stale("alpha", stale=True, now=float(second))
    [event] = site.lasting
    assert (event.check, event.uuid, event.quarantines) == (HealthCheck.COLLECTION_STALE, "", False)
    for second in range(4, 12):
        site.register.stale("alpha", stale=False, now=float(second))
    assert site.lasting == []


def test_a_fault_of_a_program_is_over_at_once_and_counted_while_it_repeats(site: Site) -> None:
    site.see()
    site.fault(31)
    site.see(OK, 30)
    site.fault(31)
    [event] = site.all
    assert (event.xid, event.count, event.resolved_at) == (31, 2, site.now)
    assert site.quarantine == ""
    site.see(OK, 100)
    site.fault(31)
    assert len(site.all) == 2


def test_a_fatal_fault_quarantines_until_the_gpu_was_away_and_answers_again(site: Site) -> None:
    site.see()
    site.fault(119)
    assert "XID 119" in site.quarantine
    site.see(OK, 1000)
    assert "XID 119" in site.quarantine, "answering alone proves nothing"
    site.see(HealthFacts("RELEASED"), 3)
    site.see(OK, HOLDS[HealthCheck.XID].resolve_after - 1)
    assert "XID 119" in site.quarantine
    site.see(OK, 3)
    assert (site.quarantine, site.lasting) == ("", [])


def test_a_boot_of_the_node_ends_a_fatal_fault(site: Site) -> None:
    site.see()
    site.fault(79)
    site.boot = "boot 2"
    site.see(OK, HOLDS[HealthCheck.XID].resolve_after + 2)
    assert site.quarantine == ""


def test_a_gpu_that_does_not_come_back_from_a_boot_stays_in_quarantine(site: Site) -> None:
    """It was well when it was seen last, but it has not answered since."""
    site.see()
    site.fault(48)
    site.see()
    site.register.shown("alpha", "boot 2", set(), site.now)
    site.tick(GONE_SECONDS / 2)
    assert "48" in site.quarantine
    site.boot = "boot 2"
    site.see(OK, HOLDS[HealthCheck.XID].resolve_after + 2)
    assert site.quarantine == ""


def test_a_fault_that_repeats_is_kept_however_many_others_are_over() -> None:
    """Its event went, to make room for newer ones: what happens now is not to be counted on one that nobody sees."""
    events = Events("run", most_resolved=3)
    register = HealthRegister(events)
    register.report("alpha", "GPU-1", 13, 0.0)
    for number in range(3):
        register.report("alpha", f"GPU-other-{number}", 13, 1.0)
    register.report("alpha", "GPU-1", 13, 30.0)
    assert [event.last_at for event in events.newest_first() if event.uuid == "GPU-1"] == [30.0]


def test_the_first_fault_of_a_gpu_that_was_never_seen_is_visible(site: Site) -> None:
    site.fault(48)
    assert [event.xid for event in site.lasting] == [48]
    assert site.quarantine
    site.see(OK, 2)
    assert site.quarantine


def test_an_admin_lifts_a_quarantine_once(site: Site) -> None:
    site.see()
    site.fault(48)
    site.see(replace(OK, remap_failed=True), 2)
    lifted = site.register.clear("alpha", "GPU-1", site.now)
    assert {event.check for event in lifted} == {HealthCheck.XID, HealthCheck.ROW_REMAP_FAILURE}
    assert site.quarantine == ""
    assert [event.check for event in site.lasting] == [HealthCheck.ROW_REMAP_FAILURE]
    site.see(replace(OK, remap_failed=True), 100)
    assert site.quarantine == "", "what lasts stays lifted"
    site.fault(48)
    assert "XID 48" in site.quarantine, "what happens again does not"
    assert site.register.clear("beta", "GPU-1", site.now) == []


def test_replays_are_judged_by_how_fast_they_grow(site: Site) -> None:
    def grow(per_minute: float, minutes: int) -> None:
        for _ in range(int(minutes * REPLAY_WINDOW_SECONDS)):
            self_count[0] += per_minute / 60.0
            site.see(replace(OK, pcie_replays=int(self_count[0])))

    self_count = [1_000_000.0]
    grow(MOST_REPLAYS_PER_MINUTE - 5, 3)
    assert site.all == []
    grow(MOST_REPLAYS_PER_MINUTE * 2, 3)
    assert [event.check for event in site.lasting] == [HealthCheck.PCIE_REPLAY]
    grow(0, 5)
    assert site.lasting == []


def test_links_that_are_down_are_an_event_and_are_counted_anew_after_the_gpu_was_away(site: Site) -> None:
    hold = HOLDS[HealthCheck.NVLINK_DOWN]
    site.see(OK, 2)
    site.see(replace(OK, nvlinks_active=17), hold.raise_after + 2)
    [event] = site.lasting
    assert (event.check, event.finding.fatal) == (HealthCheck.NVLINK_DOWN, False)
    site.see(OK, hold.resolve_after + 2)
    assert site.lasting == []
    site.see(HealthFacts("RELEASED"), 2)
    site.see(replace(OK, nvlinks_active=12), 30)
    assert site.all == [event]


def test_a_gpu_that_is_gone_for_good_is_forgotten(site: Site) -> None:
    site.see()
    site.fault(79)
    site.register.shown("alpha", site.boot, {"gpu-2"}, site.now)
    site.tick(10)
    assert site.quarantine
    site.now += GONE_SECONDS
    site.tick(1)
    assert (site.lasting, site.quarantine) == ([], "")


def test_a_gpu_that_a_snapshot_leaves_out_takes_no_memory_unless_something_is_about_it(site: Site) -> None:
    site.register.observe("alpha", {f"GPU-{number}": OK for number in range(50)}, 1.0)
    site.fault(79)
    site.register.shown("alpha", "", {"gpu-2"}, 2.0)
    known = site.register._nodes["alpha"]
    assert (set(known.gpus), set(known.pasts)) == ({"gpu-1"}, {"gpu-2"})


def test_the_newest_events_that_are_over_are_kept_and_all_that_last() -> None:
    events = Events("run", most_resolved=3)
    finding = Finding(HealthSeverity.INFO, HealthAction.NONE, "text")
    lasting = events.begin(HealthCheck.GPU_LOST, "alpha", "GPU-0", finding, 0.0)
    for number in range(10):
        events.resolve(events.begin(HealthCheck.XID, "alpha", "GPU-1", finding, float(number)), float(number))
    assert len(events) == 4
    newest = list(events.newest_first())
    assert [event.started_at for event in newest] == [9.0, 8.0, 7.0, 0.0]
    assert [event.id for event in newest] == sorted((event.id for event in newest), reverse=True)
    assert events.get(lasting.id) is lasting


def test_after_a_restart_what_was_over_first_is_dropped_first() -> None:
    """Else `kept_since` denies what is missing: it is the time of the first to be dropped."""
    before, after = Events("65000000"), Events("65000001", most_resolved=2)
    finding = Finding(HealthSeverity.INFO, HealthAction.NONE, "text")
    begun = [before.begin(HealthCheck.GPU_LOST, "alpha", f"GPU-{one}", finding, 0.0) for one in range(3)]
    for event, at in zip(begun, (9.0, 1.0, 2.0), strict=True):
        before.resolve(event, at)
    after.restore(begun)
    assert [event.resolved_at for event in after.newest_first()] == [2.0, 9.0]
    assert after.kept_since == 2.0


def test_every_number_of_the_table_makes_sense() -> None:
    """Fatal faults are critical and ask for something that takes the GPU out; all others leave it in use."""
    harmless = {HealthAction.NONE, HealthAction.RESTART_WORKLOAD, HealthAction.DRAIN}
    for xid, known in XIDS.items():
        finding = xid_finding(xid)
        assert finding.message == f"XID {xid}: {known.name}"
        assert finding.fatal == known.fatal
        assert not known.fatal or known.severity is HealthSeverity.CRITICAL
        assert not known.fatal or known.action not in harmless
    unknown = xid_finding(9999)
    assert (unknown.fatal, unknown.severity) == (False, HealthSeverity.WARNING)


def after_a_restart(before: Site) -> Site:
    """The fleet is another process, that has what the one before had kept; agents come back at once."""
    after = Site()
    after.now = before.now + 10.0
    events = Events("65000001")
    events.restore([event_from_text(event_to_text(one, 0.0), 0.0) for one in before.all])
    after.register = HealthRegister(events)
    after.register.resume()
    return after


@pytest.fixture
def first_run() -> Site:
    site = Site()
    site.register = HealthRegister(Events("65000000"))
    return site


def test_what_lasts_goes_on_after_a_restart(first_run: Site) -> None:
    first_run.see(replace(OK, remap_failed=True), 5)
    first_run.fault(79)
    [fault, remap] = first_run.lasting
    after = after_a_restart(first_run)
    after.see(replace(OK, remap_failed=True), 5)
    after.register.report("alpha", "GPU-1", 79, first_run.now)  # its agent tells of it again
    assert [one.id for one in after.lasting] == [fault.id, remap.id]
    assert after.lasting[1].started_at == remap.started_at
    assert after.lasting[0].count == 1
    assert "79" in after.quarantine
    after.fault(79)
    assert after.lasting[0].count == 2


@pytest.mark.parametrize("away", ["seen", "boot", "no"])
def test_a_fatal_fault_lasts_over_a_restart_until_the_gpu_was_away(first_run: Site, away: str) -> None:
    """Also if the agent was started anew, and knows of no fault; a boot that the fleet slept through counts."""
    first_run.see()
    first_run.fault(79)
    after = after_a_restart(after_a_restart(first_run))
    if away == "boot":
        after.boot = "boot 2"
    if away == "seen":
        after.see(OK, 100)
        after.see(HealthFacts("LOST"), 1)
    after.see(OK, HOLDS[HealthCheck.XID].resolve_after - 1)
    assert "79" in after.quarantine
    after.see(OK, 100)
    assert ("79" in after.quarantine) == (away == "no")


def test_a_gpu_that_its_node_no_longer_shows_after_a_restart_is_forgotten_in_the_end(first_run: Site) -> None:
    first_run.see()
    first_run.fault(79)
    after = after_a_restart(first_run)
    after.register.shown("alpha", "boot 2", {"gpu-2"}, after.now)
    after.tick(GONE_SECONDS - 10)
    assert after.quarantine
    after.tick(20)
    assert (after.lasting, after.quarantine) == ([], "")


def test_an_event_of_a_file_that_names_no_boot_is_read(first_run: Site) -> None:
    first_run.see()
    first_run.fault(79)
    text = event_to_text(first_run.lasting[0], 0.0).replace(', "boot_id": "boot 1"', "")
    assert "boot" not in text
    events = Events("65000001")
    events.restore([event_from_text(text, 0.0)])
    after = Site()
    after.register = HealthRegister(events)
    after.register.resume()
    after.see(OK, 100)
    assert "79" in after.quarantine
    after.boot = "boot 2"
    after.see(OK, 32)
    assert after.quarantine == ""


def test_a_quarantine_that_was_lifted_stays_lifted_after_a_restart(first_run: Site) -> None:
    """The agent tells of the fault again, since it does not know; a new fault counts."""
    first_run.see(replace(OK, remap_failed=True), 5)
    first_run.fault(79)
    first_run.register.clear("alpha", "GPU-1", first_run.now)
    after = after_a_restart(first_run)
    after.see(replace(OK, remap_failed=True), 5)
    after.register.report("alpha", "GPU-1", 79, first_run.now + 0.5)
    assert after.quarantine == ""
    assert len(after.all) == 2
    after.see(OK, 5)
    after.fault(79)
    assert "79" in after.quarantine
