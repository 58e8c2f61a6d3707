"""Pods and what makes them, as the Kubernetes adapter sees them; and the marks that it leaves on pods. Pure."""

from dataclasses import dataclass
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
