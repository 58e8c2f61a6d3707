"""Pods and what makes them: templates, the marks that the adapter leaves, which pod is which replica. Pure.

The pods of a Deployment are all alike, and the cluster makes and ends them: a replica is a pod by a mark that the adapter
leaves on it. How many pods are wanted is worked out anew every time from the pods that are there, so that a step that is
repeated, or taken by the next run of the adapter, changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gpuscale.autoscaler.adapters.engine import (
    EngineUnavailableError,
    LaunchRefusedError,
    ReplicaOrder,
    Sighting,
    WorkerLife,
)
from gpuscale.autoscaler.adapters.templates import Arguments
from gpuscale.common.sizes import counted

ADAPTER = "gpuscale.adapter"
"""Label of every pod of ours, with the adapter's id; a Deployment's pod template must have it."""
ENDPOINT = "gpuscale.endpoint"
"""Label of a pod: id of the endpoint whose replica it is."""
REPLICA = "gpuscale.replica"
"""Annotation of a pod: name of the replica that it is."""
STOPPING = "gpuscale.stopping"
"""Annotation of a pod whose replica was asked to finish."""
COST = "controller.kubernetes.io/pod-deletion-cost"
"""Annotation by which a ReplicaSet with too many pods chooses: it ends those with the lowest cost first."""


CORRECT_AFTER = 60.0
"""Seconds before a number of pods that somebody else set is corrected; doubled after each correction."""
LONGEST_CORRECTION = 3600.0


class NotAllowedError(EngineUnavailableError):
    """The adapter's account lacks a right that it needs; the text says which."""


class KubernetesTemplate(BaseModel):
    """One table [kubernetes_templates.NAME]: whose pods are the replicas; deployment or pods_of."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    deployment: str = ""
    """A Deployment that is there: its pods are the replicas, and it is scaled."""
    pods_of: str = ""
    """A Deployment that is there: the adapter makes the pods itself, after its pod template."""
    parameters: dict[str, str] = Field(default_factory=dict[str, str])
    """What its pods were made for: endpoints must ask for these very values. Not with pods_of."""
    args: Arguments = ()
    """Arguments of the pod's first container, with placeholders; only with pods_of."""
    rank_nodes: bool = True
    """Prefer the nodes that the allocator ranks best; only with pods_of."""

    @model_validator(mode="after")
    def _check_way(self) -> Self:
        if bool(self.deployment) == bool(self.pods_of):
            raise ValueError("set one of deployment and pods_of")
        if self.args and not self.pods_of:
            raise ValueError("args needs pods_of: the pods of a Deployment are made by the Deployment")
        if self.parameters and self.pods_of:
            raise ValueError("with pods_of, parameters fill the placeholders of args")
        return self

    @property
    def workload(self) -> str:
        """Name of the Deployment."""
        return self.deployment or self.pods_of


@dataclass(frozen=True, slots=True)
class PodWorkload:
    """A Deployment at one moment."""

    name: str
    replicas: int = 0  # pods that it is asked for
    version: str = ""  # its resource version, the precondition of every change
    problem: str = ""  # why nothing may be started with it; empty where all is well
    trouble: str = ""  # why it makes no pods although it should, in its own words; may be empty
    gpu_count: int = 0  # GPUs of each of its pods
    grace: int = 30  # seconds that its pods have to finish
    probed: bool = False  # whether its pods say whether they are ready


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod at one moment."""

    name: str
    uid: str  # which pod of that name it is
    owner: str  # the workload that it belongs to; of one that the adapter made, the name of the template
    replica: str = ""  # the replica that it is by its mark; empty where it has none
    stopping: bool = False  # whether its replica was asked to finish
    costly: bool = True  # whether it is not marked as one to be ended first
    going: bool = False  # whether it is being deleted
    over: bool = False  # whether it ended for good: its owner does not count it any more
    ready: bool = False  # whether it is ready
    reason: str = ""  # why it stands as it does, in the cluster's words
    exit_code: int | None = None  # of its program, once that ended for good
    created: str = ""  # when it was made, as text that sorts

    @property
    def active(self) -> bool:
        """Whether its owner counts it."""
        return not self.going and not self.over

    @property
    def serving(self) -> bool:
        """Whether its owner counts it, and its replica was not asked to finish."""
        return self.active and not self.stopping


def check_order(template: KubernetesTemplate, workload: PodWorkload, order: ReplicaOrder) -> None:
    """Check that a pod of the workload can be this replica.

    The pods of a Deployment are as the operator made them: an endpoint that asks for something else must not get them.

    Raises:
        LaunchRefusedError: none ever can.
    """
    if workload.problem:
        raise LaunchRefusedError(workload.problem)
    if template.pods_of:
        return
    what = f"Deployment {workload.name}"
    for name in sorted({*template.parameters, *order.parameters}):
        made_for, asked = (
            f"{name} {values[name]!r}" if name in values else f"no {name}"
            for values in (template.parameters, order.parameters)
        )
        if made_for != asked:
            raise LaunchRefusedError(f"{what} is made for {made_for}, and the endpoint asks for {asked}")
    if order.gpu_count != workload.gpu_count:
        raise LaunchRefusedError(
            f"a pod of {what} has {counted(workload.gpu_count, 'GPU')}, and the endpoint asks for {order.gpu_count}"
        )


def sighting(pod: Pod, note: str = "") -> Sighting:
    """A replica by the state of its pod; `note` is added to the reason."""
    if pod.over:
        return Sighting(WorkerLife.ENDED, pod.exit_code, pod.reason)
    if pod.going:
        why = "" if pod.stopping else "its pod is being deleted by somebody else or by the cluster"
        return Sighting(WorkerLife.STARTING, reason=why)
    reason = "; ".join(text for text in (pod.reason, note) if text)
    return Sighting(WorkerLife.READY if pod.ready else WorkerLife.STARTING, reason=reason)


def gone(pod: Pod) -> Sighting:
    """A replica whose pod was there and is not any more."""
    why = "" if pod.stopping else "its pod was deleted by somebody else or by the cluster"
    return Sighting(WorkerLife.ENDED, pod.exit_code, pod.reason if pod.over else why)


def arrange(pods: Iterable[Pod], waiting: Iterable[str], vanished: Iterable[str] = ()) -> list[Pod]:
    """The pods of one workload with the replicas that they should be marked as, in the order of their age.

    Replicas that wait get the pods that are nobody's: the ready ones first, then the oldest. Where the workload ended
    another pod than the one that was asked to finish, the two change their names: the replica that should run goes on in
    the pod that was left. A pod that had no node yet is gone at once, so `vanished` names the replicas that had one at the
    last look, were not asked to finish, and have none any more.
    """
    ordered = _one_each(sorted(pods, key=lambda pod: (pod.created, pod.name)))
    ordered = _exchanged(ordered, vanished)
    free = sorted((pod for pod in ordered if pod.active and not pod.replica), key=lambda pod: not pod.ready)
    given = dict(zip((pod.uid for pod in free), sorted(waiting), strict=False))
    return [
        replace(pod, replica=given[pod.uid], stopping=False, costly=True) if pod.uid in given else pod
        for pod in ordered
    ]


def _one_each(ordered: Sequence[Pod]) -> list[Pod]:
    """No two pods are the same replica: the oldest one that is not over is."""
    holders: dict[str, str] = {}
    for pod in sorted(ordered, key=lambda pod: not pod.active):
        if pod.replica:
            holders.setdefault(pod.replica, pod.uid)
    return [
        replace(pod, replica="", stopping=False)
        if pod.replica and holders[pod.replica] != pod.uid and pod.active
        else pod
        for pod in ordered
        if not pod.replica or holders[pod.replica] == pod.uid or pod.active
    ]


def _exchanged(ordered: Sequence[Pod], vanished: Iterable[str]) -> list[Pod]:
    spared = [pod for pod in ordered if pod.active and pod.stopping]
    struck = [pod for pod in ordered if pod.going and pod.replica and not pod.stopping]
    changed: dict[str, Pod] = {}
    for left, ended in zip(spared, struck, strict=False):
        changed[left.uid] = replace(left, replica=ended.replica, stopping=False, costly=True)
        changed[ended.uid] = replace(ended, replica=left.replica, stopping=True)
    for left, name in zip(spared[len(struck) :], sorted(vanished), strict=False):
        changed[left.uid] = replace(left, replica=name, stopping=False, costly=True)
    return [changed.get(pod.uid, pod) for pod in ordered]


@dataclass(frozen=True, slots=True)
class PodCount:
    """How many pods a workload should be asked for."""

    replicas: int | None = None  # so many now; None to leave it as it is
    foreign: int = 0  # pods that somebody else asked for beyond ours


def count(workload: PodWorkload, pods: Sequence[Pod], waiting: int) -> PodCount:
    """How many pods to ask for, when the pods are marked and `waiting` replicas have none.

    Pods that should finish are removed before new ones are asked for: at the same number of pods nothing would happen. What
    somebody else changed is left alone here; `CorrectionTimer` says when it is corrected.
    """
    active = [pod for pod in pods if pod.active]
    stopping = sum(pod.stopping for pod in active)
    if stopping:
        left = len(active) - stopping
        return PodCount(left if workload.replicas > left else None)
    coming = workload.replicas - len(active)
    if coming < 0:  # it is about to end some
        return PodCount()
    # Pods that are nobody's yet will be given to replicas that wait.
    spare = coming + sum(not pod.replica for pod in active) - waiting
    return PodCount(foreign=spare) if spare >= 0 else PodCount(workload.replicas - spare)


class CorrectionTimer:
    """How long a change that somebody else made to a workload stands."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._wait = CORRECT_AFTER
        self._calm_since: float | None = None

    def over(self, now: float, *, foreign: bool) -> bool:
        """Whether it is time to correct it; called at every look, with `now` in seconds since boot."""
        if not foreign:
            self._since = None
            if self._calm_since is None:
                self._calm_since = now
            if now - self._calm_since >= LONGEST_CORRECTION:
                self._wait = CORRECT_AFTER
            return False
        self._calm_since = None
        if self._since is None:
            self._since = now
        if now - self._since < self._wait:
            return False
        self._since, self._wait = None, min(2 * self._wait, LONGEST_CORRECTION)
        return True
