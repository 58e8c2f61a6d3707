"""Pods and what makes them, as the Kubernetes adapter sees them; and the marks that it leaves on pods. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

ADAPTER = "gpuscale.adapter"
"""Label of every pod of ours, with the adapter's id; a Deployment's pod template must have it."""
ENDPOINT = "gpuscale.endpoint"
"""Label of a pod: id of the endpoint whose replica it is."""
REPLICA = "gpuscale.replica"
"""Annotation of a pod: name of the replica that it is."""
STOPPING = "gpuscale.stopping"
"""Annotation of a pod whose replica was asked to finish."""
COST = "controller.kubernetes.io/pod-deletion-cost"
"""Annotation that a ReplicaSet goes by when it has too many pods: those with the lowest are ended first."""


class Kind(Enum):
    """What makes the pods of a template."""

    DEPLOYMENT = "Deployment"
    STATEFUL_SET = "StatefulSet"
    PODS = "pods"
    """The adapter itself, after the pod template of a Deployment."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A Deployment or a StatefulSet at one moment.

    Attributes:
        kind: which of the two.
        name: its name.
        replicas: pods that it is asked for.
        version: its resource version, the precondition of every change.
        problem: why nothing may be started with it; empty where all is well.
        trouble: why it makes no pods although it should, in its own words; may be empty.
        gpu_count: GPUs of each of its pods.
        grace: seconds that its pods have to finish.
        probed: whether its pods say whether they are ready.
    """

    kind: Kind
    name: str
    replicas: int = 0
    version: str = ""
    problem: str = ""
    trouble: str = ""
    gpu_count: int = 0
    grace: int = 30
    probed: bool = False


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod at one moment.

    Attributes:
        name: its name.
        uid: which pod of that name it is.
        owner: the workload that it belongs to; of one that the adapter made, the name of the template.
        replica: the replica that it is by its mark; empty where it has none.
        stopping: whether its replica was asked to finish.
        costly: whether it is not marked as one to be ended first.
        going: whether it is being deleted.
        over: whether it ended for good: its owner does not count it any more.
        ready: whether it is ready.
        reason: why it stands as it does, in the cluster's words.
        exit_code: of its program, once that ended for good.
        created: when it was made, as text that sorts.
    """

    name: str
    uid: str
    owner: str
    replica: str = ""
    stopping: bool = False
    costly: bool = True
    going: bool = False
    over: bool = False
    ready: bool = False
    reason: str = ""
    exit_code: int | None = None
    created: str = ""

    @property
    def active(self) -> bool:
        """Whether its owner counts it."""
        return not self.going and not self.over


PATIENCE = 60.0
"""Seconds for which somebody else's number of pods stands before it is put right; then twice as long, and so on."""
MOST_PATIENCE = 3600.0


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
class Count:
    """How many pods a workload should be asked for.

    Attributes:
        replicas: so many now; None to leave it as it is.
        foreign: pods that somebody else asked for beyond ours.
    """

    replicas: int | None = None
    foreign: int = 0


def count(workload: Workload, pods: Sequence[Pod], waiting: int) -> Count:
    """How many pods to ask for, when the pods are marked and `waiting` replicas have none.

    A pod that should finish is asked away before a new one is asked for: at the same number of pods nothing would happen.
    What somebody else changed is left alone here; `Patience` says when it is put right.
    """
    active = [pod for pod in pods if pod.active]
    stopping = sum(pod.stopping for pod in active)
    if stopping:
        left = len(active) - stopping
        return Count(left if workload.replicas > left else None)
    coming = workload.replicas - len(active)
    if coming < 0:  # it is about to end some
        return Count()
    # Pods that are nobody's yet will be given to replicas that wait.
    spare = coming + sum(not pod.replica for pod in active) - waiting
    return Count(foreign=spare) if spare >= 0 else Count(workload.replicas - spare)


class Patience:
    """How long what somebody else did to a workload stands."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._wait = PATIENCE
        self._calm_since: float | None = None

    def over(self, now: float, *, foreign: bool) -> bool:
        """Whether it is time to put it right; called with what is seen every time, `now` in seconds since boot."""
        if not foreign:
            self._since = None
            if self._calm_since is None:
                self._calm_since = now
            if now - self._calm_since >= MOST_PATIENCE:
                self._wait = PATIENCE
            return False
        self._calm_since = None
        if self._since is None:
            self._since = now
        if now - self._since < self._wait:
            return False
        self._since, self._wait = None, min(2 * self._wait, MOST_PATIENCE)
        return True
