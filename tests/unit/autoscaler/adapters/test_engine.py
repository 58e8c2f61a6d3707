"""What engines have in common: steps taken one by one, and replicas that were started twice."""

import asyncio
from collections.abc import Mapping

import pytest

from gpuscale.autoscaler.adapters.engine import (
    EngineUnavailableError,
    Finish,
    Kill,
    LaunchRefusedError,
    Remove,
    ReplicaOrder,
    Sighting,
    Start,
    StepsFailedError,
    StepwiseEngine,
    split_duplicates,
)


class Stubborn(StepwiseEngine):
    """Refuses to start, and fails to kill."""

    def __init__(self) -> None:
        self.taken: list[str] = []

    async def observe(self) -> Mapping[str, Sighting]:
        return {}

    async def watch(self) -> None:
        pass

    async def start(self, step: Start) -> None:
        raise LaunchRefusedError(f"no {step.template}")

    async def finish(self, step: Finish) -> None:
        self.taken.append(f"finish {step.replica} in {step.drain_timeout}")

    async def kill(self, replica: str) -> None:
        raise EngineUnavailableError(f"cannot kill {replica}")

    async def remove(self, replica: str) -> None:
        self.taken.append(f"remove {replica}")


def test_a_step_that_fails_holds_up_no_other() -> None:
    engine = Stubborn()
    start = Start(ReplicaOrder("a", "e", {}), "worker")
    assert asyncio.run(engine.apply([start, Remove("d")])) == {"a": "no worker"}
    with pytest.raises(StepsFailedError, match="cannot kill b") as caught:
        asyncio.run(engine.apply([start, Kill("b"), Finish("c", 5.0)]))
    assert (caught.value.failed, caught.value.refused) == ({"b": "cannot kill b"}, {"a": "no worker"})
    assert engine.taken == ["remove d", "finish c in 5.0"]


def test_of_a_replica_that_was_started_twice_the_older_counts() -> None:
    """The answer to the first start was lost."""
    found = [("a", 9), ("b", 7), ("a", 8), (None, 1)]
    assert split_duplicates(found, lambda number: number) == ({"a": 8, "b": 7}, [9])
