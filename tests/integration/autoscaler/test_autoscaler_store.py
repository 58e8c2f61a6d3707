"""What is on disk outlives the program, is bounded, and does not trust the clock of another boot."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy
from sqlmodel import SQLModel

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler import app
from gpuscale.autoscaler.domain.decisions import Decision
from gpuscale.autoscaler.domain.replicas import Goal, Replica, ReplicaState, revoked
from gpuscale.autoscaler.domain.signals import EndpointPast, QueueReading
from gpuscale.autoscaler.loop import reconciler
from gpuscale.autoscaler.loop.hub import Wakes
from gpuscale.autoscaler.loop.reconciler import EndpointCounts, PassFacts, come_to, read_known, run_pass
from gpuscale.autoscaler.servicers import endpoints as endpoint_changes
from gpuscale.autoscaler.state import decision_log, store
from gpuscale.autoscaler.state.decision_log import DecisionLog, Repetitions
from gpuscale.common.errors import AbortedError
from gpuscale.common.runtime.metrics_text import AT_ONCE, MetricsPage
from gpuscale.common.runtime.tasks import SystemClock, TaskScope
from gpuscale.common.store.leadership import Candidate
from gpuscale.common.store.postgres import Postgres
from gpuscale.common.store.sqlite_store import Sqlite
from gpuscale.common.store.store import Prepared, Store, _Worker
from gpuscale.common.wire import TimeRange, enum_word, to_datetime
from tests.support.autoscaler_app import FakeWatchers, running, scaling
from tests.support.autoscaler_values import AT, NOW, WALL, endpoint, lease, replica, spec, up
from tests.support.clock import ManualClock
from tests.support.fake_allocator import FakeAllocator, serving
from tests.support.postgresql import PostgresServer
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("lead_outlasts_stalls")

S = ReplicaState


@pytest.fixture(params=["sqlite", "postgresql"])
async def state(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncGenerator[Store]:
    """The store in a file, or in PostgreSQL, where this process leads."""
    if request.param == "sqlite":
        file = Sqlite(tmp_path / "a.db", SQLModel.metadata, store.VERSION)
        async with Store.open(file, name="autoscaler") as one:
            yield one
        return
    server: PostgresServer = request.getfixturevalue("postgresql")
    url = server.database()
    async with Candidate(url, "autoscaler", "here").term() as term:
        backend = Postgres(url, "autoscaler", SQLModel.metadata, store.VERSION, {}, term)
        async with Store.open(backend, name="autoscaler") as one:
            yield one


async def test_endpoints_and_rule_changes(state: Store) -> None:
    first = endpoint(spec(up()), desired=3)
    second = replace(first, desired=4, deleting=True, etag="other")
    for one in (first, second):
        await state.write(partial(store.save_endpoint, one=one))
        assert await state.read(store.endpoints) == [one]
    await state.write(partial(store.save_rule_changes, endpoint_id="e", rules={"up", "x"}, now=5.0))
    await state.write(partial(store.save_rule_changes, endpoint_id="e", rules={"up"}, now=6.0))
    changes = partial(store.rule_changes, endpoint_id="e")
    assert await state.read(changes) == {"up": 6.0, "x": 5.0}
    await state.write(partial(store.restart_rests, now=9.0))
    assert await state.read(changes) == {"up": 9.0, "x": 9.0}
    await state.write(partial(store.remove_endpoint, endpoint_id="e"))
    assert (await state.read(store.endpoints), await state.read(changes)) == ([], {})


async def test_an_endpoint_is_removed_by_no_pass_that_did_not_foresee_it(state: Store) -> None:
    """Else it is gone before its watchers are free."""
    facts, removed = PassFacts(AT, EndpointPast(), evaluate=False, repeated=None), list[bool]()
    for before in (False, True):
        await state.write(partial(store.save_endpoint, one=endpoint(desired=0, deleting=before)))
        known = await state.read(partial(read_known, endpoint_id="e", before=None))
        assert known
        await state.write(partial(store.save_endpoint, one=endpoint(desired=0, deleting=True)))
        work = partial(run_pass, endpoint_id="e", facts=facts, tried=come_to(known, facts))
        removed.append(await state.write(work) is None)
    assert (removed, await state.read(store.endpoints)) == ([False, True], [])


async def test_an_update_keeps_what_rules_made_of_the_count_meanwhile(state: Store) -> None:
    read = endpoint(spec(up()), desired=1)
    await state.write(partial(store.save_endpoint, one=replace(read, desired=5)))
    changed = replace(read, spec=spec(high=7), etag="etag-2")
    await state.write(partial(endpoint_changes.update, after=changed, etag="etag-1", asked=None, wall=WALL))
    [now] = await state.read(store.endpoints)
    assert (now.desired, now.spec.max_replicas, now.etag) == (5, 7, "etag-2")
    with pytest.raises(AbortedError):
        await state.write(
            partial(endpoint_changes.update, after=changed, etag="etag-1", asked=None, wall=WALL)
        )


async def test_starts_are_counted_and_a_reboot_is_noticed(state: Store) -> None:
    begun = [await state.write(partial(store.begin, boot_id=boot)) for boot in ("b1", "b1", "b2", "b2")]
    assert begun == [(1, False), (2, False), (3, True), (4, False)]


async def test_requests_are_kept_for_a_day(state: Store) -> None:
    old = endpoint(spec(up()))
    await state.write(
        partial(store.save_answer, request_id="old", fingerprint="f", made=replace(old, desired=0), wall=WALL)
    )
    known = await state.read(partial(store.answered, request_id="old"))
    assert known == ("f", replace(old, desired=0, etag="etag-1"))
    later = WALL.replace(day=WALL.day + 2)
    await state.write(partial(store.save_answer, request_id="new", fingerprint="g", made=old, wall=later))
    assert await state.read(partial(store.answered, request_id="old")) is None


async def test_replicas_as_they_were_written(state: Store) -> None:
    full = replica(
        1, S.FAILED, nodes=("n1", "n2"), node="n1", lease=lease(), owes_release=True, hurry=True, pid=7,
        exit_code=-9, reason="killed", ready_at=NOW, ended_at=NOW + 1, end_time=WALL,
    )  # fmt: skip
    for one in (replica(0), full):
        await state.write(partial(store.add_replica, one=one))
    assert await state.read(partial(store.replicas, show_ended=True)) == [replica(0), full]
    assert await state.read(store.replicas) == [replica(0)]
    assert await state.read(store.owing) == [full]
    assert await state.read(store.leased) == []
    ready = replica(0, S.READY, lease=lease(2))
    await state.write(partial(store.save_replica, one=ready))
    assert await state.read(partial(store.of_adapter, adapter="a")) == [ready]
    assert await state.read(store.loads) == {"a": 1}
    assert await state.read(store.leased) == [ready]
    await state.write(partial(store.save_replica, one=replica(0, goal=Goal.FORGET)))
    with pytest.raises(KeyError, match="FORGET"):  # only adapters are told so
        await state.read(store.replicas)


async def test_ended_replicas_are_kept_for_a_while_and_those_that_owe_a_release_until_it_is_done(
    state: Store,
) -> None:
    """Those that ended last, whenever they were decided: r001 served longer than any other."""
    for number in range(store.KEPT + 5):
        end = WALL + timedelta(days=1) if number == 1 else WALL + timedelta(hours=number)
        one = replica(number, S.STOPPED, lease=lease(), owes_release=number == 0, end_time=end)
        await state.write(partial(store.add_replica, one=one))
    await state.write(partial(store.prune, endpoint="e"))
    left = await state.read(lambda at: store.replicas(at, "e", show_ended=True))
    assert [one.id for one in left] == ["r000", "r001", *(f"r{n:03d}" for n in range(6, store.KEPT + 5))]
    assert await state.read(store.replicas_kept_since) == WALL + timedelta(hours=6)


async def test_replicas_that_will_lose_their_gpus_are_known_after_a_reboot(state: Store) -> None:
    """Else those in their place are too many until the allocator tells of it anew."""
    told = revoked(replica(0, S.READY, lease=lease()), NOW + 90, WALL, "drained", NOW)
    await state.write(partial(store.add_replica, one=told))
    await state.write(store.forget_boot)
    [found] = await state.read(store.replicas)
    assert found.revocation is not None
    assert found.leaving
    assert told.revocation is not None
    assert found.revocation.leave_at > NOW + 1e9, "nobody knows when"
    assert found.revocation.leave_time == told.revocation.leave_time
    again = revoked(found, 50.0, WALL, "drained", 5.0).revocation
    assert again is not None
    assert again.at == 50.0
    assert revoked(found, None, WALL, "", 5.0).revocation is None


def _numbered(connection: store.Connection, **wanted: Any) -> list[Replica]:
    """Of the endpoint, read one at a time."""
    return [one for _, one in store.replicas_after(connection, 0, 1, endpoint="e", **wanted)]


def decided(says: str, endpoint: str = "e") -> Decision:
    return Decision(endpoint, says, 1, 1, 1, (), (), None, f"stays: {says}")


def numbers(found: Sequence[api.Decision]) -> list[int]:
    return [int(one.name.rpartition("/")[2]) for one in found]


async def test_decisions_and_replicas_of_a_time(state: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decision holds until the next one of its endpoint, however seldom it was taken."""
    monkeypatch.setattr(decision_log, "KEPT", 3)
    monkeypatch.setattr(store, "KEPT", 2)
    log = DecisionLog(state, Repetitions(state))

    def hour(number: float) -> datetime:
        return WALL + timedelta(hours=number)

    for number, (of, text) in enumerate((("e", "a"), ("f", "x"), ("e", "b"), ("e", "c"), ("f", "y"))):
        await state.write(partial(decision_log.record, decision=decided(text, of), wall=hour(number)))

    async def ids(since: float | None, until: float | None, of: str = "") -> list[int]:
        times = [None if one is None else hour(one) for one in (since, until)]
        found, _, kept = await log.list(of, api.ListDecisionsRequest(), TimeRange(*times))
        assert kept == (hour(0) if of != "f" else None), "as many as are kept of e"
        return numbers(found)

    assert await ids(2.5, 2.5) == [3, 2], "one of each endpoint"
    assert await ids(0.5, 2, "e") == [3, 1]
    assert await ids(9, None, "f") == [5]
    assert await ids(None, 1) == [2, 1]
    assert await ids(None, -1) == []
    for number, end in enumerate((hour(1), hour(3), None)):
        shape = S.STOPPED if end else S.READY
        made_of = replica(number, shape, create_time=hour(number), end_time=end, lease=lease(number))
        await state.write(partial(store.add_replica, one=made_of))

    async def replicas(gpu: str = "", since: float | None = None, until: float | None = None) -> list[str]:
        times = TimeRange(*(None if one is None else hour(one) for one in (since, until)))
        every = partial(_numbered, show_ended=True, gpu_uuid=gpu, period=times)
        return [one.id for one in await state.read(every)]

    assert await replicas(since=1.5, until=1.8) == ["r001"]
    assert await replicas(since=3) == ["r001", "r002"]
    assert await replicas(until=0.5) == ["r000"]
    assert await replicas(lease(1).gpu_uuids[0]) == ["r001"]
    assert await replicas(lease(1).gpu_uuids[0][:-1]) == await replicas(lease(1).gpu_uuids[0].lower()) == []
    assert await state.read(store.replicas_kept_since) == hour(1)


async def test_decisions_stay_in_order_and_complete_where_the_wall_clock_is_set_back(state: Store) -> None:
    """By an hour, after the third of eight, ten minutes apart: 0, 10 and 20, then -30 to 10 minutes."""
    log, times = DecisionLog(state, Repetitions(state)), (0, 10, 20, -30, -20, -10, 0, 10)
    for number, minute in enumerate(times):
        wall = WALL + timedelta(minutes=minute)
        await state.write(partial(decision_log.record, decision=decided(str(number)), wall=wall))

    async def ids(since: int | None, until: int | None) -> list[int]:
        period = TimeRange(
            *(None if one is None else WALL + timedelta(minutes=one) for one in (since, until))
        )
        return numbers((await log.list("e", api.ListDecisionsRequest(), period))[0])

    assert await ids(None, None) == [8, 7, 6, 5, 4, 3, 2, 1]
    assert await ids(15, None) == [8, 7, 6, 5, 4, 3, 2], "what came later is later, whatever the clock said"
    assert await ids(None, -15) == [5, 4, 3, 2, 1]
    assert await ids(-25, -15) == [5, 4, 3, 2, 1]
    assert await ids(25, None) == [8], "the last one holds"
    assert await ids(None, -35) == []


async def test_decisions_are_merged_bounded_and_their_ids_never_used_again(
    state: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decision_log, "KEPT", 3)
    record = partial(decision_log.record, wall=WALL)
    made = [await state.write(partial(record, decision=decided(text))) for text in "aabbbacdd"]
    assert [(one.times.decision, one.times.count) for one in made] == [
        (1, 1), (1, 2), (2, 1), (2, 2), (2, 3), (3, 1), (4, 1), (5, 1), (5, 2),
    ]  # fmt: skip
    ids = await state.read(partial(decision_log.decision_ids, endpoint="e", below=None, most=10))
    assert ids == [5, 4, 3]
    kept = await state.read(partial(decision_log.decisions, ids=ids))
    assert [one.count for one in kept] == [2, 1, 1]
    await state.write(partial(decision_log.remove_decisions, endpoint="e"))
    assert (await state.write(partial(record, decision=decided("a")))).times.decision == 6
    monkeypatch.setattr(decision_log, "KEPT_IN_ALL", 2)
    for endpoint_id, text in (("f", "a"), ("e", "b"), ("e", "c")):
        await state.write(partial(record, decision=decided(text, endpoint_id)))
    await state.write(decision_log.forget_oldest)
    ids = await state.read(partial(decision_log.decision_ids, endpoint="", below=None, most=10))
    assert ids == [9, 8, 7], "the last of each endpoint stays"


class Noted:
    """What a pass does with decisions, over a store and what is remembered beside it."""

    def __init__(self, state: Store) -> None:
        self.state = state
        self.repetitions = Repetitions(state)
        self.wall = WALL

    async def take(self, says: str, summary: str = "") -> None:
        self.wall += timedelta(seconds=1)
        decision = replace(decided(says), summary=summary)
        before = self.repetitions.of("e")
        work = partial(decision_log.record, decision=decision, wall=self.wall, before=before, quiet=True)
        self.repetitions.note(await self.state.write(work), decision, self.wall, None)

    async def shown(self, *, disk: bool = False) -> list[tuple[str, int, int]]:
        """Summary, count and seconds until the last time of each, newest first; `disk`: as a restart would find them."""
        log = DecisionLog(self.state, Repetitions(self.state) if disk else self.repetitions)
        found, _, _ = await log.list("e", api.ListDecisionsRequest())
        seconds = (one.last_time.ToDatetime(WALL.tzinfo) - WALL for one in found)
        return [
            (one.summary, one.count, round(at.total_seconds()))
            for one, at in zip(found, seconds, strict=True)
        ]


async def test_a_repeated_decision_is_remembered_saved_now_and_then_and_whole_once_another_follows(
    state: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = Noted(state)
    for summary in ("first", "second", "third"):
        await noted.take("a", summary)
    assert await noted.shown() == [("third", 3, 3)]
    assert await noted.shown(disk=True) == [("first", 1, 1)]
    monkeypatch.setattr(decision_log, "SAVE_EVERY", 0.01)
    async with TaskScope() as scope:
        scope.spawn("save", noted.repetitions.run())
        await eventually(lambda: noted.shown(disk=True), lambda found: found == [("first", 3, 3)])
    await noted.take("a", "fourth")
    await noted.take("b")
    assert await noted.shown() == await noted.shown(disk=True) == [("", 1, 5), ("fourth", 4, 4)]
    await state.write(partial(store.save_endpoint, one=endpoint()))
    assert list(await state.read(lambda at: decision_log.latest(at, "e", "other"))) == ["e"]


async def test_after_a_restart_counting_goes_on_where_it_was_saved(state: Store) -> None:
    before = Noted(state)
    for _ in range(3):
        await before.take("a")
    async with before.repetitions.kept():
        pass
    after = Noted(state)
    after.wall = before.wall
    await after.take("a", "again")
    assert await after.shown() == [("again", 4, 4)]
    later = Noted(state)
    later.wall = after.wall
    await later.take("b")
    assert await later.shown(disk=True) == [("", 1, 5), ("", 3, 3)], "what was not saved is lost, and no more"


async def test_counts_that_come_too_late_are_no_other_decisions(state: Store) -> None:
    """A saving that waited while another decision was stored, or the endpoint removed, changes nothing."""
    noted = Noted(state)
    for _ in range(2):
        await noted.take("a")
    repeated = noted.repetitions.of("e")
    assert repeated is not None
    await noted.take("b")
    await state.write(partial(decision_log.save_times, every={"e": repeated.times, "gone": repeated.times}))
    assert await noted.shown(disk=True) == [("", 1, 3), ("", 2, 2)]


@pytest.mark.parametrize(("endpoint", "wanted"), [("", [6, 5, 4, 3, 2, 1]), ("b", [5, 3, 1]), ("none", [])])
async def test_a_page_of_decisions_reads_no_more_than_it_may_need(
    state: Store, endpoint: str, wanted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many endpoints there are, and however far the list was read."""
    for number in range(6):
        decision = decided(str(number), "ba"[number % 2])
        await state.write(partial(decision_log.record, decision=decision, wall=WALL))
    read: list[int] = []
    known = decision_log.decision_ids

    def counted(*asked: Any) -> list[int]:
        found = known(*asked)
        read.append(len(found))
        return found

    monkeypatch.setattr(decision_log, "decision_ids", counted)
    log, token, shown = DecisionLog(state, Repetitions(state)), "", list[int]()
    for _ in range(4):
        request = api.ListDecisionsRequest(page_size=2, page_token=token)
        some, token, _ = await log.list(endpoint, request)
        shown += numbers(some)
        if not token:
            break
    assert shown == wanted
    assert max(read) <= 3
    monkeypatch.setattr(decision_log, "SEARCHED", 3)
    for narrow in ('summary = "none"', ""), ("", "count"):
        read.clear()
        request = api.ListDecisionsRequest(page_size=1, filter=narrow[0], order_by=narrow[1])
        await log.list(endpoint, request)
        assert read == [len(wanted[:3])], "what a filter or an order examines is read at once"


async def test_a_cooldown_outlives_the_program_and_begins_anew_after_a_reboot(tmp_path: Path) -> None:
    clock = ManualClock()
    watchers = FakeWatchers(clock)
    watchers.queues["jobs"] = (100, 0)
    wanted = scaling(high=9)
    for rule in wanted.spec.rules:
        rule.cooldown.FromSeconds(100)
    async with serving(FakeAllocator({})) as address:

        async def life(expected: int, code: str) -> None:
            """One life of the program, which comes to aim at `expected` replicas and is then held back by `code`."""
            begun = clock.wall()
            async with running(tmp_path, address, watchers, clock) as autoscaler:
                if expected == 1 and code == "FIRED":
                    await autoscaler.create(wanted)

                async def decided() -> bool:
                    newer = [one for one in await autoscaler.history() if to_datetime(one.last_time) >= begun]
                    return code in [enum_word(step, "code") for one in newer for step in one.steps]

                await eventually(decided)
                assert (await autoscaler.status()).desired_replicas == expected

        await life(1, "FIRED")
        clock.advance(99)
        await life(1, "COOLDOWN")
        clock.reboot()
        clock.advance(99)
        await life(1, "COOLDOWN")
        clock.advance(100)
        await life(2, "FIRED")


class Flipping(FakeWatchers):
    """A queue that is empty at one reading and full at the next, where it is `restless`."""

    restless = True
    turn = 0

    def reading(self, watcher: str) -> QueueReading | None:
        self.turn += 1
        self.queues["jobs"] = (100 * (self.restless and self.turn % 2), 0)
        return super().reading(watcher)


@pytest.mark.parametrize(
    ("endpoints", "restless", "known_for"), [(5, False, 60), (5, True, 60), (1, False, 0)]
)
async def test_works_of_the_store_that_an_evaluation_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endpoints: int, restless: bool, known_for: float
) -> None:
    """None where nothing changes; else one, however many there are beside it. What is known is read anew after a while."""
    monkeypatch.setattr(reconciler, "KNOWN_FOR", known_for)
    evaluated, works = list[object](), list[object]()
    noted, submit = reconciler.noted, _Worker.submit
    monkeypatch.setattr(reconciler, "noted", lambda *said: (evaluated.append(said), noted(*said))[1])
    monkeypatch.setattr(_Worker, "submit", lambda *said: (works.append(said), submit(*said))[1])
    watchers = Flipping(SystemClock())
    watchers.restless = restless
    async with serving(FakeAllocator({})) as address, running(tmp_path, address, watchers) as autoscaler:
        for number in range(endpoints):
            one = scaling(tick=0.1, name=f"e{number}")
            one.spec.mode = api.ScalingMode.SCALING_MODE_SHADOW
            await autoscaler.create(one)
        for _ in range(2):
            evaluated.clear()
            works.clear()
            await eventually(lambda: len(evaluated) >= 10 * endpoints)
        # What is noted last may be written a moment after it.
        most = len(evaluated) + endpoints if restless else 0
        assert len(works) <= most if known_for else len(works) >= len(evaluated)


async def test_late_evaluations_are_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gpuscale.autoscaler.loop.reconciler")
    monkeypatch.setattr(reconciler, "LATE", 2.0)
    monkeypatch.setattr(reconciler, "LATE_EVERY", 0.05)
    busy, come_to = False, reconciler.come_to

    def held_up(*arguments: Any) -> Any:
        if busy:
            raise AbortedError("not now")
        return come_to(*arguments)

    monkeypatch.setattr(reconciler, "come_to", held_up)

    def told() -> list[str]:
        return [one.msg["event"] for one in caplog.records if "evaluations are" in str(one.msg)]

    async with serving(FakeAllocator({})) as address, running(tmp_path, address) as autoscaler:
        await autoscaler.create(scaling(tick=0.1))
        await eventually(autoscaler.history)
        busy = True
        await eventually(lambda: told()[-1:] == ["evaluations are late"])
        busy = False
        await eventually(lambda: told()[-1] == "evaluations are on time again")
        assert all(one != after for one, after in pairwise(told())), "on a busy machine also at other times"


async def test_a_restart_reads_as_often_for_many_endpoints_as_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, submit, noted = list[str](), _Worker.submit, reconciler.noted
    evaluated, counted = list[object](), list[int]()

    def submitted(worker: Any, work: Any) -> Any:
        reads.extend([worker._thread.name] * worker._thread.name.endswith("reader"))
        return submit(worker, work)

    monkeypatch.setattr(_Worker, "submit", submitted)
    monkeypatch.setattr(reconciler, "noted", lambda *said: (evaluated.append(said), noted(*said))[1])
    async with serving(FakeAllocator({})) as address:
        for first, endpoints in ((0, 1), (1, 6)):
            async with running(tmp_path, address) as autoscaler:
                for number in range(first, endpoints):
                    await autoscaler.create(scaling(tick=60, name=f"e{number}"))
            reads.clear()
            evaluated.clear()
            async with running(tmp_path, address):
                await eventually(lambda count=endpoints: len(evaluated) == count)
                counted.append(len(reads))
    assert counted[0] == counted[1]


async def test_a_page_of_a_list_costs_what_is_on_it(state: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = SimpleNamespace(live=lambda _: True, silent=lambda _: set[str]())
    deps: Any = SimpleNamespace(store=state, hub=hub, repetitions=Repetitions(state))
    listing = endpoint_changes.Endpoints(deps, Wakes(), watcher_exists=lambda _: True, prometheus=())
    work = list[str]()

    def counting(owner: Any, name: str) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *arguments: (work.append(name), original(*arguments))[1])

    for owner, name in (
        (Prepared, "all"),
        (sqlalchemy.Connection, "execute"),
        (store, "_endpoint"),
        (store, "_replica"),
    ):
        counting(owner, name)
    ids, costs = list[str](), list[int]()
    for more in (12, 60):
        for number in range(len(ids), more):
            made = f"e-{number:02}" if number % 2 else f"e{number:02}"  # in the order of no language
            ids.append(made)
            await state.write(partial(store.save_endpoint, one=endpoint(name=made)))
            await state.write(partial(store.add_replica, one=replica(number, endpoint=made)))
            await state.write(partial(decision_log.record, decision=decided("a", made), wall=WALL))
        for method, request in (
            (listing.list, api.ListEndpointsRequest(page_size=4)),
            (partial(listing.replicas, ""), api.ListReplicasRequest(page_size=4)),
        ):
            names = list[str]()
            while not names or request.page_token:
                work.clear()
                page, request.page_token = await method(request)
                if len(page) == 4:
                    costs.append(len(work))
                names += [one.name for one in page]
            assert len(set(names)) == more
            assert method is not listing.list or names == [f"endpoints/{one}" for one in sorted(ids)]
    assert max(costs) <= 2 * 5 + 6, "rows and statements of each page, the last ones too"


async def test_others_run_between_slices_of_a_scrape_and_the_next_slice_is_what_is_there_then() -> None:
    left = [(f"e{number}", EndpointCounts(1, 1, 1, 0.0), 0.0) for number in range(3 * AT_ONCE)]
    others: Any = SimpleNamespace(counts=lambda: iter(left), facts=list, states=dict, prometheus={})
    page = MetricsPage()
    task = asyncio.create_task(app.add_figures(others, others, others, others, None, page))
    for _ in range(2):  # it begins, and is through with a slice
        await asyncio.sleep(0)
    left.clear()
    await task
    assert b"".join(page.chunks()).count(b"_endpoint_desired{") == AT_ONCE
