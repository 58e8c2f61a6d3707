"""The process that speaks to Ray for the adapter: it reads a question per line, and writes an answer per line.

Its arguments are the cluster's address, the namespace and the adapter's id. It ends with its input. What Ray prints goes to
its standard error.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import BinaryIO, TypeVar

import ray
from ray import cloudpickle
from ray.exceptions import RayActorError, RayError
from ray.util import get_placement_group, list_named_actors, placement_group_table
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from gpuscale_ray import runner
from gpuscale_ray.messages import (
    ANSWER,
    PREPARED,
    QUESTION,
    STATUS,
    RayAnswer,
    RayGroup,
    RayLaunch,
    RayOrder,
    Status,
    Verb,
)

ANSWERS_WITHIN = 2.0
"""Seconds that actors have to report their status; of a slower one the status before stands."""
_REMOVED = "REMOVED"
T = TypeVar("T")


class RayCluster:
    """The replicas of one adapter in one cluster, to which this process is connected.

    Args:
        namespace: Ray's, of the actors; names hold it, since placement groups are listed without theirs.
        adapter: its id.
    """

    def __init__(self, namespace: str, adapter: str) -> None:
        cloudpickle.register_pickle_by_value(runner)
        self._actor_class = ray.remote(runner.Runner)
        self._prefix = f"gpuscale/{namespace}/{adapter}/"
        self._asked: dict[str, ray.ObjectRef] = {}
        self._said: dict[str, Status] = {}
        self._deaths: dict[str, str] = {}

    def observe(self) -> tuple[RayGroup, ...]:
        """Every placement group of this adapter that was not removed."""
        named = set(list_named_actors())
        table = {
            row["name"]: row
            for row in placement_group_table().values()
            if row["name"].startswith(self._prefix) and row["state"] != _REMOVED
        }
        alive = named | self._asked.keys()
        self._ask([name for name in sorted(alive & table.keys()) if table[name]["state"] == PREPARED])
        for kept in (self._asked, self._said, self._deaths):
            for name in kept.keys() - table.keys():
                del kept[name]
        return tuple(
            RayGroup(
                replica=name.removeprefix(self._prefix),
                state=row["state"],
                scheduling=row["stats"]["scheduling_state"],
                has_actor=name in named and name not in self._deaths,
                status=self._said.get(name),
                death=self._deaths.get(name, ""),
            )
            for name, row in table.items()
        )

    def take(self, orders: Sequence[RayOrder]) -> dict[str, str]:
        """Take orders; repeating one is harmless. Returns why some failed, by replica."""
        failed: dict[str, str] = {}
        for order in orders:
            try:
                self._take(order)
            except (RayError, ValueError) as error:
                failed[order.replica] = f"Ray failed: {error}"
        return failed

    def _take(self, order: RayOrder) -> None:
        name = self._prefix + order.replica
        actor, group = _find(ray.get_actor, name), _find(get_placement_group, name)
        match order:
            # A group without an actor has ended, or was never quite created: it is reported, and not restarted.
            case RayOrder(Verb.START, launch=RayLaunch() as launch) if group is None:
                self._start(name, launch)
            case RayOrder(Verb.FINISH) if actor is not None:
                if group is not None and placement_group_table(group)["state"] != PREPARED:
                    ray.kill(actor)
                    self._deaths[name] = "dropped before it had begun"
                else:
                    actor.finish.remote()
            case RayOrder(Verb.KILL) if actor is not None:
                killed, _ = ray.wait([actor.kill.remote()], timeout=ANSWERS_WITHIN)
                if not killed:
                    ray.kill(actor)
            case RayOrder(Verb.REMOVE):
                if actor is not None:
                    ray.kill(actor)
                if group is not None:
                    remove_placement_group(group)
            case _:  # there is nothing to do it with
                pass

    def _start(self, name: str, launch: RayLaunch) -> None:
        group = placement_group([launch.bundle], name=name, lifetime="detached")
        self._actor_class.options(
            name=name,
            lifetime="detached",
            max_restarts=0,
            num_cpus=launch.cpus,
            num_gpus=launch.gpus,
            resources=dict(launch.resources),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
        ).remote(list(launch.argv), dict(launch.env), launch.working_dir, launch.gpus)
        if (actor := _find(ray.get_actor, name)) is not None:
            self._asked[name] = actor.status.remote()  # the answer also tells why it could not start

    def _ask(self, names: Sequence[str]) -> None:
        """Ask these actors for their status; each is asked again once it has answered."""
        for name in names:
            if name not in self._asked and (actor := _find(ray.get_actor, name)) is not None:
                self._asked[name] = actor.status.remote()
        waiting = {self._asked[name]: name for name in names if name in self._asked}
        if not waiting:
            return
        answered, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=ANSWERS_WITHIN)
        for ref in answered:
            name = waiting[ref]
            del self._asked[name]
            try:
                self._said[name] = STATUS.validate_python(ray.get(ref))
            except RayActorError as error:
                self._deaths[name] = str(error).strip().splitlines()[-1].strip()


def _find(get: Callable[[str], T], name: str) -> T | None:
    """The actor or placement group of a name; None if there is none, it has ended, or was removed."""
    try:
        return get(name)
    except ValueError:
        return None


def main(argv: list[str]) -> int:
    """Answer until the input ends; returns the exit code."""
    address, namespace, adapter = argv
    with os.fdopen(os.dup(1), "wb", buffering=0) as answers:
        os.dup2(2, 1)  # no library may write among the answers
        try:
            ray.init(address, namespace=namespace, log_to_driver=False, logging_level=logging.WARNING)
        except (RayError, ConnectionError, RuntimeError, ValueError) as error:
            _put(answers, RayAnswer(error=f"cannot connect to Ray at {address}: {error}"))
            return 1
        cluster = RayCluster(namespace, adapter)
        for line in sys.stdin.buffer:
            orders = QUESTION.validate_json(line).orders
            try:
                answer = RayAnswer(failed=cluster.take(orders)) if orders else RayAnswer(cluster.observe())
                _put(answers, answer)
            except (RayError, ConnectionError, TimeoutError) as error:
                _put(answers, RayAnswer(error=f"Ray failed: {error}"))
    return 0


def _put(answers: BinaryIO, answer: RayAnswer) -> None:
    answers.write(ANSWER.dump_json(answer) + b"\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
