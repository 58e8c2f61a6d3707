"""Running use policies: a look at all holders every few seconds, and the resulting acts; and dry runs over the past.

The readings are those that nodes send anyway: processes on a GPU at once, utilization every 10 s (docs/adr/0029). A look first
acts and then writes its acts and notifications in one transaction: after a kill in between it acts again, and revoking what is
revoked changes nothing.

Outsiders are killed by orders, which the agents of hosts that opted in ask for: nobody connects to an agent, and an agent only
acts on what it checks itself. An order is given once, and never late. If an agent took an order and does not answer, its
outcome is unknown.
"""

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import NoReturn
from uuid import uuid4

import grpc

from gpuscale.allocator.domain.ledger import RETENTION
from gpuscale.allocator.domain.model import WHOLE, Gpu, NodeState, Reservation
from gpuscale.allocator.domain.notifications import NotifiedEvent, of_act
from gpuscale.allocator.domain.usage import IDLE_PERCENT, UseState
from gpuscale.allocator.domain.use_policies import (
    BUSY,
    IDLE,
    Action,
    DryRun,
    GpuSighting,
    PolicyAct,
    PolicyCondition,
    PolicySubject,
    RecordedHold,
    RecordedUse,
    SeenSubject,
    StageOutcome,
    Track,
    UsePolicy,
    ended,
    judge,
    moment,
    notice,
)
from gpuscale.allocator.queueing.model import QueueWorld
from gpuscale.allocator.state.archive import RecordFilter
from gpuscale.allocator.state.policies import ACTS_KEPT, FollowedTrack, Key, PolicyStore
from gpuscale.allocator.usecases.accounting import Accounting
from gpuscale.allocator.usecases.declarations import Declarations
from gpuscale.allocator.usecases.draining import Maintenance
from gpuscale.allocator.usecases.fleet import FleetView
from gpuscale.allocator.usecases.leases import Records, every
from gpuscale.allocator.usecases.notifying import Notifying
from gpuscale.api.allocator import v1 as api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common import errors, wire
from gpuscale.common.names import gpu_name, node_name, reservation_name
from gpuscale.common.rpc.channel import RPC_TIMEOUT
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.runtime.logs import Attempts, get_logger
from gpuscale.common.runtime.tasks import in_slices, wait_at_most

HEARD = 15.0
"""Seconds after which an agent that asked for no orders is silent; it asks every 5 s."""
ANSWER = 10.0
"""Seconds to wait for the result of an order."""


@dataclass(eq=False, slots=True)
class _Pending:
    """An order that waits for its answer, and whether an agent took it."""

    order: api.KillOrder
    node: str
    answer: "asyncio.Future[str]"
    handed: bool = False


@dataclass(eq=False)
class KillOrders:
    """The pending orders."""

    view: FleetView
    _pending: dict[str, _Pending] = field(default_factory=dict[str, _Pending], init=False)
    _heard: dict[str, float] = field(default_factory=dict[str, float], init=False)

    async def kill(self, gpu: str, process: tuple[int, int], grace: float) -> tuple[StageOutcome, str]:
        """End a process on a GPU, given by its resource name: DONE, or REFUSED or ASKED with the reason."""
        node, loop = gpu.split("/")[1], asyncio.get_running_loop()
        agent = f"the agent of {node_name(node)}"
        if self._heard.get(node, float("-inf")) < loop.time() - HEARD:
            return StageOutcome.REFUSED, f"{node_name(node)} has no gpuscale-killer, or its agent is silent"
        pid, ticks = process
        order = api.KillOrder(
            id=uuid4().hex, gpu=gpu, pid=pid, start_ticks=ticks, grace=wire.to_duration(grace)
        )
        one = self._pending[order.id] = _Pending(order, node, loop.create_future())
        try:
            async with asyncio.timeout(ANSWER):
                problem = await one.answer
                return (StageOutcome.REFUSED if problem else StageOutcome.DONE), problem
        except TimeoutError:
            if not one.handed:
                return StageOutcome.REFUSED, f"{agent} took no order within {ANSWER:g} s"
            silent = f"{agent} took the order, but reported no result within {ANSWER:g} s"
            return StageOutcome.ASKED, silent
        finally:
            del self._pending[order.id]

    def take(self, node: str, results: Sequence[tuple[str, str]]) -> list[api.KillOrder]:
        """Take results of orders (id, problem); returns the node's pending orders. Raises NotFoundError for an unknown node."""
        errors.NotFoundError.unless(self.view.get(node), node_name(node))
        for order, problem in results:
            one = self._pending.get(order)
            if one is not None and one.node == node and not one.answer.done():
                one.answer.set_result(problem)
        self._heard[node] = asyncio.get_running_loop().time()
        given = [one for one in self._pending.values() if one.node == node and not one.handed]
        for one in given:
            one.handed = True
        return [one.order for one in given]


LOOK = 10.0
"""Seconds between two looks."""
SAID_EVERY = 60.0
"""Most seconds between records of a look: how much counted time a crash may lose."""
SLICE = 64
"""Subjects that are looked at before other calls run."""
_MARK = "policy {}: "
_log = get_logger(__name__)


@dataclass(eq=False)
class Policing:
    """Carries out use policies. `open_policing` makes one; then `run` must run."""

    policies: Declarations[UsePolicy]
    store: PolicyStore
    records: Records
    world: QueueWorld
    maintenance: Maintenance
    notifying: Notifying
    orders: KillOrders
    _tracks: dict[Key, FollowedTrack] = field(default_factory=dict[Key, FollowedTrack], init=False)
    _acts: deque[tuple[int, PolicyAct]] = field(init=False)
    notes: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]], init=False)
    """The policies' notes on reservations, by id, for their holders."""
    _said: float = field(default=float("-inf"), init=False)
    _wake: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    async def load(self) -> None:
        """Load what is on disk."""
        await self.policies.load()
        self.policies.changed = self._wake.set
        self._tracks = await self.store.tracks(self.records.clock.now())
        self._acts = deque(await self.store.acts(), maxlen=ACTS_KEPT)

    async def run(self, tell: Callable[[Reservation], None]) -> NoReturn:
        """Look for ever; `tell` is called with each reservation whose notes have changed."""
        writing = Attempts(_log, "cannot write acts of policies", errors.GpuscaleError)
        while True:
            await wait_at_most(self._wake, LOOK)
            self._wake.clear()
            with writing:  # the next look does what this one could not
                for one in await self.look():
                    tell(one)

    def acts(self) -> list[tuple[int, PolicyAct]]:
        """What policies did, and nearly did, newest first, each with its number."""
        return list(reversed(self._acts))

    def standings(self, policy_id: str) -> list[Track]:
        """The tracks of the subjects for which the condition of a policy holds, as of the last look, longest first."""
        found = [one.track for (of, _), one in self._tracks.items() if of == policy_id]
        return sorted(found, key=lambda one: -one.held)

    async def look(self) -> list[Reservation]:
        """Look once at all subjects of policies; returns the reservations whose notes have changed."""
        clock = self.records.clock
        policies = {key: (etag, policy) for key, etag, policy in self.policies.specs()}
        if not (policies or self._tracks):
            return []
        sightings = await self._sightings([policy for _, policy in policies.values()])
        now, wall = clock.now(), clock.wall()
        after: dict[Key, FollowedTrack] = {}
        acts: list[PolicyAct] = []
        for key, (etag, policy) in policies.items():
            async for sighting in in_slices(sightings[policy.condition is PolicyCondition.OUTSIDER], SLICE):
                if not policy.scope.holds(sighting.subject):
                    continue
                before = self._tracks.get((key, sighting.subject.name))
                known = before.track if before and before.etag == etag else None
                track, done = judge(key, policy, sighting, known, now, wall)
                acts += done
                if track is not None:
                    after[key, sighting.subject.name] = FollowedTrack(track, etag)
        seen = {one.subject.name for kind in sightings.values() for one in kind}
        for (key, name), before in self._tracks.items():
            if key not in policies or policies[key][0] != before.etag:
                acts += ended(key, None, before.track, "the policy was changed", wall)
            elif name not in seen:
                acts += ended(key, policies[key][1], before.track, "it ended", wall, gone=True)
        await self._carry_out(after, acts, now)
        notes, live = self.notes.copy(), self.records.ledger.live
        self.notes.clear()  # in place, for whoever answers with them
        for (key, _), one in after.items():
            said = notice(key, policies[key][1], one.track)
            for reservation in one.track.subject.reservations if said else ():
                self.notes[reservation] = (*self.notes.get(reservation, ()), said)
        both = {*notes, *self.notes}
        changed = {one for one in both if len(notes.get(one, ())) != len(self.notes.get(one, ()))}
        return [live[one] for one in changed if one in live]

    async def _carry_out(
        self, after: dict[Key, FollowedTrack], acts: Sequence[PolicyAct], now: float
    ) -> None:
        """Carry out the acts, write them, and then take them in."""
        leases = self.maintenance.leases
        live = leases.ledger.live
        for act in acts:
            mark = _MARK.format(act.policy)
            if Action.REVOKE in act.actions and act.outcome is StageOutcome.DONE:
                await leases.revoke(act.reservations, now + act.grace, f"{mark}{act.reason}")
            elif act.outcome is StageOutcome.LIFTED:
                told = [
                    one for one in act.reservations if one in live and live[one].end_reason.startswith(mark)
                ]
                await self.maintenance.reprieve(told)
        async with asyncio.TaskGroup() as group:
            kills = [group.create_task(self._kill(act, after)) for act in acts]
        acts = [one.result() for one in kills]
        changed: dict[Key, FollowedTrack | None] = {key: None for key in self._tracks if key not in after}
        marks = attrgetter("counting", "done", "spared", "subject.reservations")
        for key, one in after.items():
            before, track = self._tracks.get(key), one.track
            if (
                before is None
                or before.etag != one.etag
                # or it would lead to another time than the one on disk
                or marks(before.track) != marks(track)
                or abs(before.track.foreseen(track.seen) - track.held) > 1e-3
            ):
                changed[key] = one
        if changed or acts or (after and now - self._said >= SAID_EVERY):
            number = self._acts[-1][0] if self._acts else 0
            numbered = list(enumerate(acts, number + 1))
            events: list[NotifiedEvent] = []
            for act in acts:
                holders = dict.fromkeys(live[one].holder for one in act.reservations if one in live)
                events += of_act(act, list(holders))
            letters = self.notifying.letters(events)
            await self.store.save_look(now, changed, numbered, letters)
            self._said = now
            self._acts.extend(numbered)
            self.notifying.posted(letters)
        self._tracks = after
        for act in acts:
            _log.info("policy acted", policy=act.policy, subject=act.subject, outcome=act.outcome.value)

    async def _kill(self, act: PolicyAct, after: Mapping[Key, FollowedTrack]) -> PolicyAct:
        """Kill a process if the act says so; returns the act with its outcome."""
        if Action.KILL not in act.actions or act.outcome is not StageOutcome.DONE:
            return act
        process = after[act.policy, act.subject].track.subject.process or (0, 0)
        outcome, problem = await self.orders.kill(act.subject.partition("/processes/")[0], process, act.grace)
        reason = f"{act.reason}; not known to have ended: {problem}" if problem else act.reason
        return replace(act, outcome=outcome, reason=reason)

    async def _sightings(self, policies: Iterable[UsePolicy]) -> dict[bool, list[SeenSubject]]:
        """What is seen of reservations (False) and of processes on GPUs (True), if a policy covers them."""
        kinds = {policy.condition is PolicyCondition.OUTSIDER for policy in policies}
        found: dict[bool, list[SeenSubject]] = {False: [], True: []}
        held = list(self.records.ledger.reservations(ended=False)) if False in kinds else []
        async for one in in_slices(held, SLICE):
            if one.gpus and not one.waiting:
                usage = self.records.usage(one)
                gpus: list[GpuSighting] = []
                for uuid, gpu in usage.gpus.items() if usage else ():
                    known = gpu.state is not UseState.UNKNOWN or gpu.over_used is not None
                    idle = None if gpu.state is UseState.UNKNOWN else gpu.state is UseState.IDLE
                    read = known or gpu.utilization_percent is not None
                    gpus.append(
                        GpuSighting(uuid, idle, gpu.over_used, None, bool(gpu.quarantine) if read else None)
                    )
                age = self.records.clock.now() - self.world.granted_at(one)
                subject = subject_of(reservation_name(one.id), [one])
                found[False].append(SeenSubject(subject, tuple(gpus), max(0.0, age)))
        followed: dict[str, dict[str, PolicySubject]] = defaultdict(dict)
        for subject in (one.track.subject for one in self._tracks.values()):
            followed[subject.name.partition("/processes/")[0]][subject.name] = subject
        async for node in in_slices(self.records.view.nodes if True in kinds else (), SLICE):
            found[True] += self._of_node(node.id, followed)
        return found

    def _of_node(
        self, node_id: str, followed: Mapping[str, Mapping[str, PolicySubject]]
    ) -> Iterable[SeenSubject]:
        """The processes on a node's GPUs that may be outsiders; if its processes are unknown, those already tracked."""
        node, now, ledger = self.records.view.get(node_id), self.records.clock.now(), self.records.ledger
        for gpu in node.gpus if node else ():
            holders = ledger.use.on(gpu).reservations
            fresh = node is not None and node.state is NodeState.ONLINE and gpu.fresh_until >= now
            if not (fresh and gpu.processes_known and not gpu.trouble):
                there = followed.get(gpu_name(node_id, gpu.uuid), {})
                yield from (SeenSubject(one, (_outsider(gpu, None),)) for one in there.values())
                continue
            held = [ledger.live[one] for one in holders if one in ledger.live]
            for one in gpu.processes:
                if one.reservation not in holders:
                    name = f"{gpu_name(node_id, gpu.uuid)}/processes/{one.pid}"
                    subject = subject_of(name, held, node_id, gpu.model, (one.pid, one.start_ticks or 0))
                    yield SeenSubject(subject, (_outsider(gpu, None if one.unknown else one.pid),))


async def open_policing(
    store: PolicyStore,
    decode: Callable[[str], UsePolicy],
    records: Records,
    world: QueueWorld,
    maintenance: Maintenance,
    notifying: Notifying,
    orders: KillOrders,
) -> Policing:
    """Runs the stored policies, from where they stopped."""
    policies = Declarations("policies", store, decode, records.clock)
    found = Policing(policies, store, records, world, maintenance, notifying, orders)
    await found.load()
    return found


def subject_of(
    name: str,
    held: Sequence[Reservation],
    node: str = "",
    model: str = "",
    process: tuple[int, int] | None = None,
) -> PolicySubject:
    """A reservation, or a process on a GPU of a `node` that these hold, with the attributes that scopes match."""
    return PolicySubject(
        name,
        tuple(one.id for one in held),
        frozenset(one.tenant for one in held),
        frozenset(one.holder for one in held),
        frozenset(label for one in held for label in one.labels.items()),
        frozenset({node} if node else {gpu.node for one in held for gpu in one.gpus}),
        frozenset({model} if node else {gpu.model for one in held for gpu in one.gpus}),
        process,
    )


def _outsider(gpu: Gpu, pid: int | None) -> GpuSighting:
    return GpuSighting(gpu.uuid, None, None, None if pid is None else (pid,), None)


STEP = 60.0
"""Seconds between looks: the step of the fleet's daily history."""
WINDOW = 2880
"""Steps of one GPU that are read at once: a few milliseconds."""
RECORDED = (PolicyCondition.IDLE, PolicyCondition.OVER_TIME)


@dataclass(eq=False)
class DryRuns:
    """Runs one at a time, since it reads a lot."""

    records: Records
    world: QueueWorld
    accounting: Accounting
    fleet: grpc.aio.Channel
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def run(self, name: str, policy: UsePolicy, start: float, end: float) -> tuple[DryRun, RecordedUse]:
        """What a policy would have done from `start` to `end`, in seconds since 1970, and over which steps.

        Raises:
            FailedPreconditionError: NOT_RECORDED, for a condition without records.
            InvalidArgumentError: the period is empty, or begins before the oldest records of reservations.
            ResourceExhaustedError: another one is running.
        """
        now = self.records.clock.wall().timestamp()
        if policy.condition not in RECORDED:
            raise errors.FailedPreconditionError(
                f"what {policy.condition.name} needs is not recorded: create the policy in shadow, and see what it would do",
                reason="NOT_RECORDED",
            )
        if not start < end <= now + STEP:
            raise errors.InvalidArgumentError(
                "start_time must be before end_time, and both past", field="start_time"
            )
        if start < now - RETENTION - STEP:
            days = f"{RETENTION / 86_400:g} days"
            raise errors.InvalidArgumentError(
                f"start_time must be within the last {days}", field="start_time"
            )
        if self._turn.locked():
            raise errors.ResourceExhaustedError(
                "another dry run is running: try again later", reason="BUSY", retry_after=5.0
            )
        async with self._turn:
            wanted = RecordFilter(period=wire.TimeRange(moment(start), moment(end)))
            every_one = await every(partial(self.records.list_reservations, wanted, ended=True))
            held = [one for one in every_one if one.gpus and not one.waiting]
            holds = [await self._hold(one, now) for one in held]
            holds = [one for one in holds if policy.scope.holds(one.subject)]
            use = RecordedUse(start, STEP, int((end - start) // STEP))
            if policy.condition is PolicyCondition.IDLE:
                use = await self._use(use, sorted({uuid for one in holds for uuid in one.gpus}))
            found = DryRun()
            for one in holds:
                await asyncio.to_thread(found.replay, name, policy, one, use)
            found.acts.sort(key=lambda act: act.time)
            return found, use

    async def _hold(self, one: Reservation, now: float) -> RecordedHold:
        end = one.ended.timestamp() if one.ended else now + STEP
        if one.live:
            begin = now - (self.records.clock.now() - self.world.granted_at(one))
        elif one.wanted is None:
            begin = one.created.timestamp()
        else:  # it waited first: the ledger knows for how long it held something
            _, used = await self.accounting.statistics(one.id)
            begin = end - max((gpu.tally.granted for gpu in used), default=0) / 1000
        gpus = tuple(dict.fromkeys(gpu.uuid for gpu in one.gpus))
        shared = frozenset(gpu.uuid for gpu in one.gpus if gpu.milli < WHOLE)
        return RecordedHold(subject_of(reservation_name(one.id), [one]), gpus, shared, begin, end)

    async def _use(self, use: RecordedUse, uuids: list[str]) -> RecordedUse:
        """The fleet's history of the GPUs. Its steps follow the fleet's clock: ours are aligned to them."""
        stub, aligned = monitor_api.HistoryServiceStub(self.fleet), False
        for uuid in uuids:
            states = use.gpus.setdefault(uuid, bytearray(use.count))
            points: list[monitor_api.HistoryPoint] = []
            for index in range(0, use.count, WINDOW):
                begin, end = (use.start + one * STEP for one in (index, min(index + WINDOW, use.count)))
                request = monitor_api.QueryHistoryRequest(
                    uuids=[uuid],
                    metrics=[monitor_api.Metric.METRIC_UTILIZATION_PERCENT],
                    span=monitor_api.HistorySpan(
                        start_time=wire.to_timestamp(moment(begin)), end_time=wire.to_timestamp(moment(end))
                    ),
                    step=wire.to_duration(STEP),
                )
                with suppress(errors.NotFoundError), rpc_errors():  # no agent reports it any more
                    found = await stub.QueryHistory(request, timeout=RPC_TIMEOUT)
                    points += [point for series in found.series for point in series.points]
            if points and not aligned:
                begin = use.start + (_seconds(points[0]) - use.start) % STEP  # aligned to the history
                count = int((use.start + use.count * STEP - begin) // STEP)
                use, aligned = replace(use, start=begin, count=count), True
            mean = sum(one.sample_count for one in points) / max(1, len(points))
            for one in points:
                place = round((_seconds(one) - use.start) / STEP)
                if 0 <= place < use.count and 2 * one.sample_count >= mean:  # half a step is none
                    states[place] = IDLE if one.max < IDLE_PERCENT and states[place] != BUSY else BUSY
        return use


def _seconds(point: monitor_api.HistoryPoint) -> float:
    return point.start_time.seconds + point.start_time.nanos / 1e9
