"""How a replica stands by what its engine says of its container, and which containers are ours."""

import pytest

from gpuscale.autoscaler.adapters.engine import ReplicaOrder, Sighting, WorkerLife
from gpuscale.autoscaler.adapters.engines.container.containers import (
    STARTING,
    UNWELL,
    Details,
    container_name,
    labels,
    listed_health,
    owned,
    sighting,
)

ORDER = ReplicaOrder("endpoints/chat/replicas/r1", "endpoints/chat", {})
NAME = container_name("here", ORDER.replica)
LABELS = labels("here", ORDER)
TERMINATED = "it ended with exit code 143, often SIGTERM"


@pytest.mark.parametrize(
    ("state", "details", "expected"),
    [
        ("running", Details(pid=7), Sighting(WorkerLife.READY, pid=7)),
        ("running", Details(pid=7, health="healthy"), Sighting(WorkerLife.READY, pid=7)),
        ("running", Details(pid=7, health="starting"), Sighting(WorkerLife.STARTING, reason=STARTING, pid=7)),
        ("running", Details(pid=7, health="unhealthy"), Sighting(WorkerLife.STARTING, reason=UNWELL, pid=7)),
        ("paused", Details(pid=7), Sighting(WorkerLife.STARTING, reason="its engine calls it paused", pid=7)),
        ("exited", Details(), Sighting(WorkerLife.ENDED, 0, "it ended with exit code 0")),
        ("exited", Details(exit_code=3), Sighting(WorkerLife.ENDED, 3, "it ended with exit code 3")),
        ("exited", Details(exit_code=143), Sighting(WorkerLife.ENDED, 143, TERMINATED)),
        ("exited", Details(exit_code=255), Sighting(WorkerLife.ENDED, 255, "it ended with exit code 255")),
        (
            "exited",
            Details(exit_code=137, out_of_memory=True, memory=64),
            Sighting(
                WorkerLife.ENDED,
                137,
                "the kernel killed it when it ran out of memory, at its limit of 64 bytes",
            ),
        ),
        (
            "exited",
            Details(exit_code=127, error="no such file"),
            Sighting(WorkerLife.ENDED, 127, "the engine says: no such file"),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_how_it_stands(state: str, details: Details, expected: Sighting) -> None:
    assert sighting(state, details) == expected


def test_one_that_was_made_and_never_started_waits_for_its_start() -> None:
    assert sighting("created", Details()).life is WorkerLife.WAITING


def test_why_the_adapter_ended_it_is_what_counts() -> None:
    assert sighting("exited", Details(exit_code=137), "given up").reason == "given up"


@pytest.mark.parametrize(
    ("status", "health"),
    [
        ("Up 3 minutes (healthy)", "healthy"),
        ("Up 3 minutes (unhealthy)", "unhealthy"),
        ("Up 1 second (health: starting)", "starting"),
        ("Up 3 minutes", ""),
        ("Exited (137) 2 minutes ago", ""),
    ],
)
def test_health_in_a_listing(status: str, health: str) -> None:
    assert listed_health(status) == health


def test_a_container_is_ours_by_name_and_labels() -> None:
    assert owned("here", [f"/{NAME}"], LABELS) == ORDER.replica
    assert owned("here", [NAME, "other"], {**LABELS, "of.the.image": "x"}) == ORDER.replica


@pytest.mark.parametrize(
    ("called", "marked"),
    [
        ("somebody-else", LABELS),
        (NAME, {}),
        (NAME, {**LABELS, "gpuscale.adapter": "there"}),
        (NAME, {**LABELS, "gpuscale.replica": "endpoints/chat/replicas/r2"}),
        (NAME, {**LABELS, "gpuscale.replica": "../../etc"}),
    ],
    ids=["committed image", "no labels", "other adapter", "other replica", "no replica"],
)
def test_anything_else_is_foreign(called: str, marked: dict[str, str]) -> None:
    assert owned("here", [called], marked) is None


def test_no_two_replicas_share_a_name() -> None:
    """Ids hold hyphens, so the texts alone may meet: a-b and c, a and b-c."""
    names = {
        container_name(adapter, f"endpoints/{endpoint}/replicas/{replica}")
        for adapter in ("here", "there")
        for endpoint, replica in (("a-b", "c"), ("a", "b-c"))
    }
    assert len(names) == 4


@pytest.mark.parametrize(
    ("network", "networks", "label", "url"),
    [
        ("bridge", {"bridge": {"IPAddress": "10.88.0.7"}}, "8000/metrics", "http://10.88.0.7:8000/metrics"),
        ("host", {"host": {"IPAddress": ""}}, "8000/metrics", "http://127.0.0.1:8000/metrics"),
        ("none", {}, "8000/metrics", ""),
        ("bridge", {"bridge": {"IPAddress": "10.88.0.7"}}, "", ""),
    ],
)
def test_where_it_shows_its_metrics(
    network: str, networks: dict[str, dict[str, str]], label: str, url: str
) -> None:
    config, at = {"Labels": labels("here", ORDER, label)}, {"NetworkMode": network}
    shown = {"Config": config, "HostConfig": at, "NetworkSettings": {"Networks": networks}}
    details = Details.model_validate(shown)
    assert sighting("running", details).metrics == url
