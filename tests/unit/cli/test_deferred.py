"""Modules that are loaded when something of them is first used."""

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from threading import Thread
from types import ModuleType

import pytest

from gpuscale.cli import deferred


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A deferred module that takes a while to load, and fails where the variable FAIL is set."""
    (tmp_path / "slow_module.py").write_text(
        "import os, time\nfirst = 1\nassert 'FAIL' not in os.environ\ntime.sleep(0.2)\nlast = 2\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(deferred, "DEFERRED", ("slow_module",))
    yield import_module("slow_module")
    del sys.modules["slow_module"]


def test_it_is_loaded_by_its_first_use_and_then_is_a_module_like_others(slow: ModuleType) -> None:
    assert "first" not in vars(slow)
    assert slow.last == 2
    assert type(slow) is ModuleType
    with pytest.raises(AttributeError, match="slow_module"):
        slow.nothing  # noqa: B018


def test_threads_never_see_half_of_it(slow: ModuleType) -> None:
    with ThreadPoolExecutor(2) as pool:
        loading = pool.submit(lambda: slow.last)
        while "first" not in vars(slow):
            time.sleep(0.001)
        assert pool.submit(lambda: slow.last).result() == loading.result() == 2


def test_one_that_fails_is_tried_again(slow: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIL", "1")
    for _ in range(2):
        with pytest.raises(AssertionError):
            _ = slow.last
    monkeypatch.delenv("FAIL")
    assert slow.last == 2


@pytest.mark.parametrize(
    "other", ["plain", "second"], ids=["a module and an import", "two modules in a circle"]
)
def test_threads_that_load_at_once_never_wait_for_each_other(
    other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is in the midst of the deferred `first`, the other in that of `other`, when each comes to need more."""
    meet = "from meeting import both; both(10)\n"
    for name, text in {
        "meeting": "import threading\nboth = threading.Barrier(2).wait",
        "first": f"{meet}import {other}; {other}.last\nlast = 1",
        "plain": f"{meet}import third\nlast = third.last",
        "second": f"{meet}import first; first.last\nlast = 2",
        "third": "last = 3",
    }.items():
        (tmp_path / f"{name}.py").write_text(f"{text}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(deferred, "DEFERRED", ("first", "second", "third"))
    failed = list[BaseException]()

    def use(name: str) -> None:
        try:
            _ = import_module(name).last
        except AttributeError as error:  # as where two threads import a circle
            failed.append(error)

    threads = [Thread(target=use, args=(name,), daemon=True) for name in ("first", other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert bool(failed) == (other == "second")
    for name in ("meeting", "first", "plain", "second", "third"):
        sys.modules.pop(name, None)
