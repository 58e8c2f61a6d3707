"""Named tasks that never outlive their scope, and programs that stop as told."""

import asyncio
import gc
import json
import signal
import textwrap
import weakref
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress

import grpc
import pytest

from gpuscale.common.errors import InternalError, NotFoundError
from gpuscale.common.runtime import lifecycle
from gpuscale.common.runtime.tasks import TaskScope, pause_before_retry
from tests.support.ports import free_port
from tests.support.up import Typed


async def forever(ended: list[str], name: str) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append(name)


async def fail(error: Exception) -> None:
    await asyncio.sleep(0)
    raise error


async def test_leaving_the_scope_cancels_and_awaits_every_task() -> None:
    ended: list[str] = []
    async with TaskScope() as tasks:
        tasks.spawn("eternal", forever(ended, "eternal"))
        short = tasks.start("one-shot", forever(ended, "one-shot"))
        await asyncio.sleep(0)
    assert sorted(ended) == ["eternal", "one-shot"]
    assert short.cancelled()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_scope_left_at_once_leaves_no_coroutine_behind() -> None:
    """Warnings are errors in this suite: a coroutine that nobody awaited would fail it."""
    async with TaskScope() as tasks:
        tasks.spawn("eternal", forever([], ""))
        tasks.start("one-shot", forever([], ""))


async def test_a_one_shot_gives_its_value_and_may_end() -> None:
    async def answer() -> int:
        await asyncio.sleep(0)
        return 42

    async with TaskScope() as tasks:
        assert await tasks.start("answer", answer()) == 42


async def scope_with(*tasks: tuple[str, Coroutine[None, None, None]]) -> None:
    """A scope whose block waits for ever while these run."""
    async with TaskScope() as scope:
        for name, work in tasks:
            scope.spawn(name, work)
        await asyncio.Event().wait()


async def test_a_failing_task_ends_the_scope_with_its_error_and_name() -> None:
    ended: list[str] = []
    with pytest.raises(KeyError) as caught:
        await scope_with(("other", forever(ended, "other")), ("fleet sweeper", fail(KeyError("node"))))
    assert caught.value.__notes__ == ["in task fleet sweeper"]
    assert ended == ["other"]
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


async def test_a_task_that_ends_early_is_an_error_that_names_it() -> None:
    async def ends() -> None: ...

    with pytest.raises(InternalError, match="fleet sweeper") as caught:
        await scope_with(("fleet sweeper", ends()))
    assert caught.value.reason == "TASK_ENDED"


async def test_several_errors_are_a_group() -> None:
    async def fail_when_cancelled() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ValueError("second") from None

    with pytest.raises(ExceptionGroup) as caught:
        await scope_with(("two", fail_when_cancelled()), ("one", fail(KeyError("first"))))
    assert {type(error) for error in caught.value.exceptions} == {KeyError, ValueError}


async def test_the_error_of_the_block_is_raised_as_itself_with_what_led_to_it() -> None:
    before = KeyError("before")
    error = NotFoundError("no node")
    error.__context__ = before

    async def scoped() -> None:
        async with TaskScope() as tasks:
            tasks.spawn("eternal", forever([], ""))
            raise error

    with pytest.raises(NotFoundError) as caught:
        await scoped()
    assert caught.value is error
    assert error.__context__ is before


async def test_a_cancelled_scope_stays_cancelled() -> None:
    entered = asyncio.Event()

    async def scoped() -> None:
        async with TaskScope() as tasks:
            tasks.spawn("eternal", forever([], ""))
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(scoped())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_closed_scope_takes_no_task() -> None:
    async with TaskScope() as tasks:
        pass
    with pytest.raises(RuntimeError):
        tasks.start("late", forever([], ""))
    with pytest.raises(RuntimeError):
        tasks.spawn("late", forever([], ""))


PROGRAM = """
import asyncio, os, signal, sys, time
from gpuscale.common.runtime import lifecycle, logs
from gpuscale.common.errors import FailedPreconditionError, InvalidArgumentError
from gpuscale.common.runtime.tasks import TaskScope

async def eternal(error=None):
    await asyncio.sleep(0)
    if error:
        raise error
    await asyncio.Event().wait()

async def main(stop):
{body}

{prelude}
logs.configure("info", "json")
sys.exit(lifecycle.run(main, program="gpuscale-test"))
"""

SERVE = """
print("serving", flush=True)
await stop.wait()
"""


@contextmanager
def program(body: str, prelude: str = "") -> Iterator[Typed]:
    source = PROGRAM.format(body=textwrap.indent(body, "    "), prelude=prelude)
    process = Typed(source, module="tests.support.source")
    try:
        yield process
    finally:
        process.close()


def ended(process: Typed) -> tuple[int, str, str]:
    ran = process.ended()
    return ran.code, ran.out, ran.err


def await_line(process: Typed, line: str) -> None:
    assert process.stdout.readline() == line + "\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_stops_the_program_in_order(number: signal.Signals) -> None:
    heard = "signal.signal(signal.SIGHUP, signal.SIG_DFL)"  # also where these tests run below nohup
    with program(SERVE + 'os.kill(os.getpid(), signal.SIGHUP)\nprint("cleaned up")', heard) as process:
        await_line(process, "serving")
        process.send_signal(number)
        assert ended(process) == (0, "cleaned up\n", "")


def test_a_hangup_that_is_ignored_stays_ignored() -> None:
    ignored = "signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    with program("os.kill(os.getpid(), signal.SIGHUP)\nprint(stop.is_set())", ignored) as process:
        assert ended(process) == (0, "False\n", "")


def test_the_collector_does_not_look_while_some_calls_are_under_way() -> None:
    made = "before = gc.get_stats()[0]['collections']\nheld = [[] for _ in range(5000)]\n"
    told = "print(gc.isenabled(), gc.get_stats()[0]['collections'] > before, flush=True)"
    with program(made + told, "import gc") as process:
        assert ended(process) == (0, "True False\n", "")


@pytest.mark.parametrize(
    ("prelude", "loop"),
    [("import uvloop", "uvloop"), ("sys.modules['uvloop'] = None", "asyncio.unix_events")],
    ids=["uvloop", "no uvloop"],
)
def test_the_loop_is_uvloop_where_it_is_there(prelude: str, loop: str) -> None:
    body = "print(type(asyncio.get_running_loop()).__module__, flush=True)\n" + SERVE
    with program(body, prelude) as process:
        await_line(process, loop)
        await_line(process, "serving")
        process.send_signal(signal.SIGTERM)
        assert ended(process)[0] == 0


@pytest.mark.parametrize(
    ("stuck", "number", "code"),
    [("await asyncio.sleep(60)", signal.SIGINT, 130), ("while True: time.sleep(0.01)", signal.SIGTERM, 143)],
    ids=["awaiting", "blocking the loop"],
)
def test_a_second_signal_ends_the_program_at_once(stuck: str, number: signal.Signals, code: int) -> None:
    with program(SERVE + 'print("stopping", flush=True)\n' + stuck) as process:
        await_line(process, "serving")
        process.send_signal(number)
        await_line(process, "stopping")
        process.send_signal(number)
        assert ended(process)[0] == code


SHORT_LIMITS = "lifecycle.STOP_WARNING_SECONDS, lifecycle.STOP_LIMIT_SECONDS = 0.1, 0.5"


def test_a_program_that_does_not_stop_is_ended_and_says_what_hung() -> None:
    body = "asyncio.current_task().set_name('the hanging task')" + SERVE + "await eternal()"
    with program(body, SHORT_LIMITS) as process:
        await_line(process, "serving")
        process.send_signal(signal.SIGTERM)
        code, _, err = ended(process)
        assert code == 1
        for text in ("still stopping", "the hanging task", "Timeout"):
            assert text in err


def test_a_loop_that_is_stuck_is_ended_too() -> None:
    with program("print('serving', flush=True)\nwhile True: time.sleep(0.01)", SHORT_LIMITS) as process:
        await_line(process, "serving")
        process.send_signal(signal.SIGTERM)
        code, _, err = ended(process)
        assert code == 1
        assert "in main" in err


def test_an_error_at_start_is_one_line() -> None:
    with program('raise FailedPreconditionError("the directory x is in use by process 5")') as process:
        code, _, err = ended(process)
        assert (code, err.count("\n")) == (1, 1)
        told = json.loads(err)
        assert (told["event"], told["error"]) == (
            "the program failed",
            "the directory x is in use by process 5",
        )


def test_an_error_at_start_is_for_people_where_the_log_is() -> None:
    body = 'logs.configure(format="console")\nraise FailedPreconditionError("the directory x is in use")'
    with program(body) as process:
        assert ended(process)[::2] == (1, "gpuscale-test: error: the directory x is in use\n")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        ('InvalidArgumentError("not an address", field="listen")', "listen: not an address"),
        ('InvalidArgumentError("broker b has no URL")', "broker b has no URL"),
    ],
)
def test_a_wrong_setting_that_is_met_late_ends_the_program_as_one_that_is_met_early(
    error: str, told: str
) -> None:
    with program(f"raise {error}") as process:
        assert ended(process)[::2] == (2, f"gpuscale-test: error: {told}\n")


@pytest.mark.parametrize("error", ["KeyError('node')", "FailedPreconditionError('lost')"])
def test_a_task_that_fails_ends_the_program_with_its_name_and_traceback(error: str) -> None:
    body = f"""
async with TaskScope() as tasks:
    tasks.spawn("fleet sweeper", eternal({error}))
    await stop.wait()
"""
    with program(body) as process:
        code, _, err = ended(process)
        assert code == 1
        assert err.count("\n") == 1
        for text in (
            "the program failed",
            "fleet sweeper",
            error.split("'")[1],
            "in eternal",
            '"level": "error"',
        ):
            assert text in err


def test_signals_are_as_before_when_the_program_has_ended() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    async def main(stop: asyncio.Event) -> None:
        signal.raise_signal(signal.SIGTERM)
        await asyncio.wait_for(stop.wait(), 60)

    assert lifecycle.run(main, program="gpuscale-test") == 0
    assert before == {number: signal.getsignal(number) for number in before}


class Ring:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.own = self


def test_a_full_collection_looks_at_what_is_new_and_now_and_then_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    enabled = gc.isenabled()
    try:
        with lifecycle.collecting_what_is_new():
            kept = [Ring() for _ in range(1000)]
            gc.collect()
            assert all(one is not kept[0] for one in gc.get_objects(generation=2)), (
                "it is not looked at again"
            )
            new, old = weakref.ref(Ring()), weakref.ref(kept[-1])
            kept.pop()
            gc.collect()
            assert (new(), old() is None) == (None, False)
            monkeypatch.setattr(lifecycle, "LOOK_AT_ALL", 0.0)
            gc.collect()
            assert old() is None
    finally:
        gc.unfreeze()
        (gc.enable if enabled else gc.disable)()


async def test_a_loop_over_streams_ends_whenever_it_is_cancelled() -> None:
    """GRPC loses a cancellation at some moments while a stream begins."""
    address = f"127.0.0.1:{free_port()}"

    async def follow(channel: grpc.aio.Channel) -> None:
        while True:
            with suppress(grpc.aio.AioRpcError):
                await channel.stream_stream("/nothing/Listens")().read()
            await pause_before_retry(0)

    for turns in range(60):
        async with grpc.aio.insecure_channel(address) as channel:
            following = asyncio.create_task(follow(channel))
            for _ in range(turns):
                await asyncio.sleep(0)
            following.cancel()
            done, _ = await asyncio.wait({following}, timeout=10)
            assert done, f"still follows where it is cancelled after {turns} turns"
