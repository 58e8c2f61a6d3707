"""Who takes part in a move is killed (kill -9) at every step of it: the move goes on or is undone, and nothing is leaked.

Allocator, autoscaler and adapters are processes. So are replicas, which write a diary: it tells in which order things came
about, however rarely a test looks.
"""

import asyncio
import json
import signal
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from uuid import uuid4

import grpc
import psutil
import pytest

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as api
from gpuscale.common.errors import UnavailableError
from gpuscale.common.wire import to_datetime, to_duration
from tests.support.allocator import Client
from tests.support.allocator_process import AllocatorProcess, Site, site
from tests.support.autoscaler_app import endpoint
from tests.support.program import AutoscalerProcess, Program, engine_program
from tests.support.scripted_autoscaler import kill_processes, processes_of
from tests.support.waiting import eventually

WAIT = 120.0
LONG = 600.0
"""Seconds of leases that nobody has to renew here."""
KILLED = -signal.SIGKILL
COUNT = 2
"""Replicas that move."""
pytestmark = pytest.mark.timeout(600)
# It is ready once `serve`, or that of its own, is there, and when it is asked to end works on until `finish` is.
WORKER = """\
cd $1; id=${GPUSCALE_REPLICA##*/}
[ "$2" = probe ] && exec test -e up-$id
say() { echo "$1 $id $GPUSCALE_GPU_UUIDS" >> diary; }
trap 'say asked; asked=1' TERM
say start
until [ -e serve ] || [ -e serve-$id ] || [ "$asked" ]; do sleep 0.02; done
[ "$asked" ] || { say up; : > up-$id; until [ -e finish ] && [ "$asked" ]; do sleep 0.02; done; }
say end
"""


@dataclass
class Move:
    """Two hosts: on one two replicas and a free GPU, on the other somebody who stays and room for them; a gang waits for all of one."""

    folder: Path
    place: Site
    autoscaler: AutoscalerProcess
    adapters: dict[str, Program]
    allocator: AllocatorProcess
    failpoint: str = ""
    endpoint: str = field(default_factory=lambda: f"moves-{uuid4().hex[:12]}")
    gang: asyncio.Task[allocator_api.Reservation] | None = None
    old: set[str] = field(default_factory=set[str])
    here: str = "n0"
    there: str = "n1"

    async def begin(self) -> None:
        """Lead there."""
        self.allow("serve")
        for one in (self.autoscaler, *self.adapters.values()):
            await one.start()
        full = await self.place.client.reserve(COUNT, ttl=LONG, nodes=[f"nodes/{self.there}"])
        await self.place.client.reserve(1, ttl=LONG, nodes=[f"nodes/{self.there}"])
        wanted = endpoint(low=COUNT, high=COUNT, gpus=1, name=self.endpoint, movable=to_duration(5))
        wanted.spec.template.lease_ttl.CopyFrom(to_duration(LONG))
        async with self.autoscaler.called() as called:
            # A replica moves to where it could have started.
            await eventually(lambda: called.connected(len(self.adapters)), timeout=WAIT)
            await called.create(wanted)
        self.old = await self.wrote("up", count=COUNT)
        (self.folder / "serve").unlink()
        await self.place.client.release(full)
        self.gang = asyncio.create_task(self._wait_in_line())

    async def _wait_in_line(self) -> allocator_api.Reservation:
        """As a client does whose call fails: it asks the same again."""
        client, request_id = Client(self.place.client.stub, LONG), str(uuid4())
        while True:
            try:
                return await client.reserve(
                    COUNT + 1, request_id=request_id, ttl=LONG, wait=to_duration(LONG)
                )
            except UnavailableError:
                await asyncio.sleep(0.05)

    async def ask(self) -> None:
        """Tell the replicas to leave as soon as others can take their place."""

        capacity = allocator_api.CapacityServiceStub(self.place.channel)
        await eventually(
            lambda: capacity.PlanRebalance(allocator_api.PlanRebalanceRequest(), timeout=60),
            lambda found: any(one.moves for one in found.plans),
            timeout=WAIT,
            retry_on=(AssertionError, grpc.RpcError),
        )
        await capacity.ApplyRebalance(allocator_api.ApplyRebalanceRequest(), timeout=60)

    def allow(self, what: str) -> None:
        """`serve`: replicas that start get ready, or `serve-` one of them; `finish`: those that are asked to end do so."""
        (self.folder / what).touch()

    def diary(self) -> list[list[str]]:
        """What replicas wrote: word, replica and GPU."""
        return [line.split(" ") for line in (self.folder / "diary").read_text().splitlines()]

    def who(self, word: str) -> set[str]:
        """The replicas that wrote it."""
        return {name for kind, name, _ in self.diary() if kind == word}

    async def wrote(self, word: str, but: Collection[str] = (), count: int = 1) -> set[str]:
        """Wait until so many replicas wrote it, `but` these."""

        def found() -> set[str]:
            those = self.who(word).difference(but)
            return those if len(those) >= count else set()

        return await eventually(found, timeout=WAIT)

    async def killed(self, one: Program, *failpoints: str) -> None:
        """Kill it; then it lives and dies at each of the failpoints; then it lives."""
        await one.kill()
        for point in failpoints:
            await one.start(f"{point}=kill")
            assert await one.ended(WAIT) == KILLED, point
        await one.start()

    async def next_allocator(self, failpoint: str = "") -> None:
        """Kill the allocator, unless it dies at its failpoint; the next has this one."""
        if self.failpoint:
            assert (await self.allocator.ended(WAIT))[0] == KILLED, self.failpoint
        await self.allocator.kill()
        self.failpoint = failpoint
        self.allocator = await self.place.start(failpoint and f"{failpoint}=kill")

    async def undone(self) -> None:
        """Wait until the old replicas stand without a notice, nothing is left of others, and the gang waits."""
        await self._stands(1, lambda row: row.name.rpartition("/")[2] in self.old)
        assert self.gang is not None
        assert not self.gang.done()
        assert not self.old & self.who("asked")
        self._check_diary()

    async def made(self) -> None:
        """Wait until the gang has the GPUs that the old replicas had, and as many serve elsewhere."""
        assert self.gang is not None
        granted = await asyncio.wait_for(self.gang, WAIT)
        with (self.folder / "diary").open("a") as diary:
            diary.writelines(f"start gang {gpu.uuid}\n" for gpu in granted.gpus)
        assert {gpu.node_name for gpu in granted.gpus} == {f"nodes/{self.here}"}
        await self._stands(2, lambda row: row.node == f"nodes/{self.there}")
        self._check_diary()
        page = await self.place.client.page(show_ended=True, page_size=1000)
        for pair in combinations(page.reservations, 2):
            early, late = sorted(pair, key=lambda one: to_datetime(one.create_time))
            if {gpu.uuid for gpu in early.gpus} & {gpu.uuid for gpu in late.gpus}:
                assert early.HasField("end_time"), pair
                assert to_datetime(early.end_time) <= to_datetime(late.create_time), pair

    async def _stands(self, others: int, right: Callable[[api.Replica], bool]) -> None:
        """Wait until all replicas are there, the right ones, and no process, lease or notice but of them and `others`."""

        async def check() -> bool:
            async with self.autoscaler.channel() as called:
                rows = await called.replicas()
            live = await self.place.client.live()
            assert len(rows) == COUNT, rows
            for row in rows:
                assert (row.state, row.HasField("revoke_time")) == (api.Replica.STATE_READY, False), row
                assert right(row), row
            assert {row.reservation for row in rows} < {one.name for one in live}
            assert len(live) == COUNT + others, live
            assert not any(one.HasField("revoke_time") for one in live), live
            mine = processes_of(f"endpoints/{self.endpoint}/")
            assert {one.environ()["GPUSCALE_REPLICA"] for one in mine} == {row.name for row in rows}
            return True

        # Rows and processes come and go meanwhile, and an allocator may be on its way.
        passing = AssertionError, ValueError, LookupError, psutil.Error, UnavailableError, grpc.RpcError
        await eventually(check, timeout=WAIT, retry_on=passing)

    def _check_diary(self) -> None:
        """As many replicas as ever served at any time, none was started twice, and no GPU was one's while it was another's."""
        holds, serving, begun = dict[str, str](), set[str](), set[str]()
        # Whom a stop meets while its process starts is killed: it writes nothing more, and is reported once it is dead.
        heard = {"gang", *(name for word, name, _ in self.diary() if word != "start")}
        for word, name, gpu in (lines := self.diary()):
            if word == "start":
                assert holds.get(gpu) not in heard, lines
                assert name == "gang" or name not in begun, lines
                holds[gpu] = name
                begun.add(name)
            elif word == "up":
                serving.add(name)
            else:
                serving.discard(name)
                assert len(serving) >= COUNT, lines
            if word == "end":
                del holds[gpu]


@pytest.fixture
async def move(tmp_path: Path) -> AsyncGenerator[Move]:
    (tmp_path / "worker.sh").write_text(WORKER)
    (tmp_path / "diary").touch()
    command = ["/bin/sh", str(tmp_path / "worker.sh"), str(tmp_path)]
    async with AsyncExitStack() as stack:
        place = await stack.enter_async_context(site(tmp_path / "allocator", gpus=COUNT + 1, nodes=2))
        address = place.arguments[place.arguments.index("--listen") + 1]
        place.arguments += ["--preemption-min-runtime-seconds", "0"]
        autoscaler = await stack.enter_async_context(AutoscalerProcess(tmp_path / "autoscaler", address))
        adapters: dict[str, Program] = {}
        for node in ("n0", "n1"):
            config = tmp_path / f"{node}.toml"
            config.write_text(
                f'[adapter]\nautoscaler_address = "{autoscaler.address}"\nnode = "{node}"\n'
                f"data_dir = {json.dumps(str(tmp_path / node))}\n"
                f"[templates.worker]\ncommand = {json.dumps(command)}\n"
                f"[templates.worker.probe]\nexec = {json.dumps([*command, 'probe'])}\nperiod = 0.1\ntimeout = 60\n"
            )
            adapters[node] = await stack.enter_async_context(engine_program("process", config, {}))
        one = Move(tmp_path, place, autoscaler, adapters, await place.start())
        try:
            await one.begin()
            yield one
        finally:
            if one.gang is not None:
                one.gang.cancel()
            for program in (autoscaler, *adapters.values()):
                await program.kill()
            kill_processes(f"endpoints/{one.endpoint}/")


async def test_the_autoscaler_is_killed_at_each_step_and_the_move_goes_on(move: Move) -> None:
    await move.autoscaler.kill()
    await move.ask()
    steps = ("replica.after_intent", "replica.after_reserve", "replica.after_record", "adapter.before_send")
    await move.killed(move.autoscaler, *(f"autoscaler.{step}" for step in steps))
    await move.wrote("start", but=move.old)
    await move.killed(move.autoscaler)
    move.allow("serve")
    await move.wrote("up", but=move.old)
    await move.killed(move.autoscaler)
    await move.wrote("asked")
    await move.autoscaler.kill()
    move.allow("finish")
    await move.killed(
        move.autoscaler, "autoscaler.replica.before_release", "autoscaler.replica.after_release"
    )
    await move.made()


async def test_the_adapters_are_killed_at_each_step_and_the_move_goes_on(move: Move) -> None:
    old, new = move.adapters[move.here], move.adapters[move.there]
    await old.kill()
    await new.kill()
    await move.ask()
    await old.start()
    steps = ("engine.before_apply", "start.after_intent", "start.after_spawn")
    await move.killed(new, *(f"adapter.{step}" for step in steps))
    await move.wrote("start", but=move.old)
    await move.killed(new)
    await old.kill()
    move.allow("serve")
    await move.wrote("up", but=move.old)
    await move.killed(new)
    await move.killed(old, "adapter.engine.before_apply", "adapter.engine.after_apply")
    await move.wrote("asked")
    await old.kill()
    move.allow("finish")
    await move.wrote("end")
    await old.start()
    await move.made()


async def test_the_allocator_is_killed_at_each_step_and_the_move_is_undone_until_it_can_only_go_on(
    move: Move,
) -> None:
    await move.next_allocator("allocator.change.before_commit")
    with pytest.raises(grpc.RpcError):
        await move.ask()
    await move.next_allocator("allocator.reserve.before_commit")
    await move.undone()
    await move.ask()
    await move.next_allocator()
    await move.undone()
    await move.next_allocator("allocator.reserve.before_reply")
    await move.ask()
    await move.next_allocator()
    await move.undone()
    begun = move.who("start")
    await move.ask()
    await move.wrote("start", but=begun)
    await move.next_allocator()
    await move.undone()
    asked = move.who("asked")
    await move.ask()
    move.allow("serve")
    await move.wrote("asked", but=asked, count=COUNT)  # now none can stay
    await move.next_allocator("allocator.end.before_commit")
    move.allow("finish")
    await move.next_allocator()
    await move.made()


async def test_all_are_killed_between_two_moves_and_only_what_is_not_made_is_undone(move: Move) -> None:
    move.allow("finish")
    await move.ask()
    new, _ = await move.wrote("start", but=move.old, count=2)
    move.allow(f"serve-{new}")
    [gone] = await move.wrote("end", but=[new])
    for one in (move.autoscaler, *move.adapters.values()):
        await move.killed(one)
    await move.next_allocator()
    move.old = move.old - {gone} | {new}
    await move.undone()
    await move.ask()
    move.allow("serve")
    await move.made()
