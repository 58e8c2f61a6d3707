"""What Ray is told of a replica, and what is made of what Ray says."""

import pytest
from pydantic import ValidationError

from gpuscale.autoscaler.adapters.engine import LaunchRefusedError, ReplicaOrder, Sighting, WorkerLife
from gpuscale_ray.engine import RayTemplate, ray_launch
from gpuscale_ray.messages import ANSWER, RayGroup, RayLaunch, Status, sighting

REPLICA = "endpoints/e/replicas/r"


def order(gpus: int = 2, **parameters: str) -> ReplicaOrder:
    return ReplicaOrder(REPLICA, "endpoints/e", parameters, gpu_count=gpus)


def group(
    state: str = "CREATED", scheduling: str = "FINISHED", *, has_actor: bool = True, **fields: object
) -> RayGroup:
    known: dict[str, object] = {
        "replica": REPLICA,
        "state": state,
        "scheduling": scheduling,
        "has_actor": has_actor,
    }
    return ANSWER.validate_python({"groups": [known | fields]}).groups[0]


def test_a_template_filled_in() -> None:
    made = RayTemplate(
        command=("{python}", "worker.py", "--queue={queue}", "{gpu_count}"),
        env={"MODE": "fast"},
        pass_env=("AMQP_URL",),
        num_cpus=0.5,
        resources={"rack-7": 1},
    )
    told = ray_launch("worker", {"worker": made}, order(queue="jobs"), {"AMQP_URL": "u", "OTHER": "x"})
    own = {"GPUSCALE_ENDPOINT": "endpoints/e", "GPUSCALE_REPLICA": REPLICA}
    assert told == RayLaunch(
        argv=("{python}", "worker.py", "--queue=jobs", "2"),
        env={"AMQP_URL": "u", "MODE": "fast", **own},
        cpus=0.5,
        gpus=2,
        resources={"rack-7": 1.0},
    )
    assert told.bundle == {"CPU": 0.5, "GPU": 2.0, "rack-7": 1.0}


@pytest.mark.parametrize(
    ("template", "gpus", "why"),
    [
        ({"num_cpus": 0}, 0, "asks Ray for nothing"),
        ({"pass_env": ("AMQP_URL",)}, 1, "passes on AMQP_URL"),
        ({"command": ("/bin/worker", "{queue}")}, 1, "needs the parameter queue"),
    ],
    ids=["no resources", "no variable", "no value"],
)
def test_a_replica_that_cannot_be_started_as_asked(template: dict[str, object], gpus: int, why: str) -> None:
    made = RayTemplate.model_validate({"command": ("/bin/worker",)} | template)
    with pytest.raises(LaunchRefusedError, match=why):
        ray_launch("worker", {"worker": made}, order(gpus), {})
    with pytest.raises(LaunchRefusedError, match="no template other"):
        ray_launch("other", {"worker": made}, order(gpus), {})


@pytest.mark.parametrize(
    "fields",
    [
        {"command": ("worker",)},
        {"command": ("/bin/sh", "-c", "{python} x")},
        {"env": {"CUDA_VISIBLE_DEVICES": "0"}},
        {"resources": {"GPU": 1}},
        {"resources": {"rack": 0}},
        {"num_cpus": -1},
        {"num_cpus": 0.33333},
        {"resources": {"rack-7": 0.00001}},
    ],
    ids=[
        "no path",
        "python inside",
        "GPUs of its own",
        "GPUs as resource",
        "nothing of it",
        "less than nothing",
        "finer than Ray counts",
        "finer of its own",
    ],
)
def test_templates_that_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        RayTemplate.model_validate({"command": ("/bin/worker",)} | fields)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (
            group("PENDING", "NO_RESOURCES"),
            Sighting(
                WorkerLife.STARTING,
                reason="waits for Ray (NO_RESOURCES): the resources that its placement group asks for are taken",
            ),
        ),
        (group(), Sighting(WorkerLife.STARTING, reason="its actor is being started")),
        (group(status=Status(7, None, 0.1)), Sighting(WorkerLife.STARTING)),
        (group(status=Status(7, None, 0.2)), Sighting(WorkerLife.READY)),
        (group(status=Status(7, 3, 9)), Sighting(WorkerLife.ENDED, 3, "it ended with exit code 3")),
        (group(status=Status(7, -9, 9)), Sighting(WorkerLife.ENDED, -9, "it ended by signal 9")),
        (
            group(has_actor=False, death="its node died", status=Status(7, None, 9)),
            Sighting(WorkerLife.ENDED, reason="its actor is gone: its node died"),
        ),
        (
            group("RESCHEDULING", "QUEUED", has_actor=False),
            Sighting(WorkerLife.ENDED, reason="its actor is gone: Ray does not say why"),
        ),
    ],
    ids=["waits", "begins", "young", "runs", "ended", "killed", "died", "lost its node"],
)
def test_what_a_placement_group_says_of_its_replica(seen: RayGroup, expected: Sighting) -> None:
    assert sighting(seen) == expected
