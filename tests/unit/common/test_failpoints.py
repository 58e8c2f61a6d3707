"""Named failpoints. What `kill` does to a store is tested in tests/fault/common."""

import time

import pytest

from gpuscale.common.errors import UnavailableError
from gpuscale.common.runtime import tasks
from tests.support.cli import python


@pytest.mark.parametrize(
    "text", ["a", "a=", "=kill", "a=explode", "a=kill:1", "a=sleep", "a=sleep:x", "a=error:1"]
)
def test_text_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        tasks.parse_failpoints(text)


def test_error_raises_only_at_its_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_points", tasks.parse_failpoints("a.b.c=error, d=sleep:0"))
    tasks.hit("a.b")
    tasks.hit("d")
    with pytest.raises(UnavailableError, match=r"a\.b\.c") as caught:
        tasks.hit("a.b.c")
    assert caught.value.reason == "FAILPOINT"


def test_sleep_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_points", tasks.parse_failpoints("a=sleep:0.05"))
    before = time.monotonic()
    tasks.hit("a")
    assert time.monotonic() - before >= 0.05


@pytest.mark.parametrize("call", ["hit('a.b')", "__import__('asyncio').run(hit_async('a.b'))"])
def test_the_variable_of_a_process_kills_it_at_the_point(call: str) -> None:
    program = (
        f"from gpuscale.common.runtime.tasks import *; print('before', flush=True); {call}; print('after')"
    )
    done = python(program, environment={"GPUSCALE_FAILPOINTS": "a.b=kill"})
    assert (done.code, done.out) == (-9, "before\n")


@pytest.mark.looptime
async def test_points_on_the_loop_sleep_without_blocking_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_points", tasks.parse_failpoints("a=sleep:100,b=error"))
    await tasks.hit_async("a")
    with pytest.raises(UnavailableError):
        await tasks.hit_async("b")
