"""What the ECS engine asks of AWS, and what it makes of pages, refusals, silence and answers that come late."""

from collections.abc import Generator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import AsyncMock

import boto3
import pytest
from botocore.stub import Stubber

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.adapters.engine import (
    EngineUnavailableError,
    Finish,
    Kill,
    Remove,
    ReplicaOrder,
    Sighting,
    Start,
    StepsFailedError,
    WorkerLife,
)
from gpuscale.autoscaler.adapters.main import open_adapter
from gpuscale.autoscaler.adapters.settings import Host
from gpuscale.common.errors import FailedPreconditionError, InvalidArgumentError
from gpuscale.common.runtime.tasks import SystemClock
from gpuscale_ecs.client import EcsCalls, open_client
from gpuscale_ecs.engine import EcsEngine, EcsSettings
from gpuscale_ecs.tasks import run_request

if TYPE_CHECKING:
    from types_boto3_ecs import ECSClient

ONE, TWO, THREE = (f"endpoints/e/replicas/{name}" for name in ("one", "two", "three"))
TEMPLATE = {"task_definition": "worker", "container": "main"}
SETTINGS = EcsSettings.model_validate(
    {
        "adapter": "a",
        "cluster": "c",
        "data_dir": "d",
        "poll_seconds": 1,
        "ecs_templates": {"worker": TEMPLATE},
    }
)
STARTER = "gpuscale/a"
BORN = datetime(2026, 1, 1, tzinfo=UTC)


def start(replica: str = ONE) -> Start:
    return Start(ReplicaOrder(replica, "endpoints/e", {}, gpu_count=1), "worker")


def described(arn: str, replica: str = ONE, status: str = "RUNNING", age: float = 0.0) -> dict[str, Any]:
    return {
        "taskArn": arn,
        "lastStatus": status,
        "createdAt": BORN - timedelta(seconds=age),
        "tags": [{"key": "gpuscale:replica", "value": replica}],
        "overrides": {"containerOverrides": [{"name": "main"}]},
        "containers": [{"name": "sidecar", "exitCode": 9}, {"name": "main", "exitCode": 0}],
    }


class Aws:
    """A client whose calls and answers a test writes down beforehand; another call, or another argument, fails."""

    def __init__(self, client: "ECSClient") -> None:
        self.client = client
        self.stub = Stubber(client)

    def lists(self, *running: list[str], stopped: list[str] | None = None) -> None:
        """Both lists, that of the running in pages."""
        pages = running or ([],)
        for index, page in enumerate(pages):
            params = {"cluster": "c", "startedBy": STARTER, "desiredStatus": "RUNNING"}
            more = {"nextToken": str(index + 1)} if index + 1 < len(pages) else {}
            self.stub.add_response(
                "list_tasks",
                {"taskArns": page, **more},
                params | ({"nextToken": str(index)} if index else {}),
            )
        self.stub.add_response(
            "list_tasks",
            {"taskArns": stopped or []},
            {"cluster": "c", "startedBy": STARTER, "desiredStatus": "STOPPED"},
        )

    def describes(self, *tasks: dict[str, Any], of: list[str] | None = None, missing: str = "") -> None:
        """What these tasks are, of the ARNs that are asked for."""
        asked = [task["taskArn"] for task in tasks] if of is None else of
        failures = [{"arn": asked[0], "reason": missing}] if missing else []
        self.stub.add_response(
            "describe_tasks",
            {"tasks": list(tasks), "failures": failures},
            {"cluster": "c", "tasks": asked, "include": ["TAGS"]},
        )

    def runs(self, answer: dict[str, Any], replica: str = ONE) -> None:
        """The answer to a request for a replica."""
        request = run_request("worker", SETTINGS.ecs_templates["worker"], start(replica).order, "a", "c")
        self.stub.add_response("run_task", answer, dict(request))

    def stops(self, arn: str) -> None:
        """A task is stopped."""
        self.stub.add_response(
            "stop_task", {}, {"cluster": "c", "task": arn, "reason": "stopped by gpuscale"}
        )


@pytest.fixture(scope="module")
def client() -> Generator["ECSClient"]:
    one = boto3.session.Session("key", "secret").client("ecs", region_name="eu-west-1")
    yield one
    one.close()


@pytest.fixture
def aws(client: "ECSClient") -> Generator[Aws]:
    one = Aws(client)
    with one.stub:
        yield one
        one.stub.assert_no_pending_responses()


@pytest.fixture
def engine(aws: Aws) -> EcsEngine:
    return EcsEngine(SETTINGS, EcsCalls(aws.client, "c"))


async def test_every_page_is_read_and_described_a_hundred_at_a_time(engine: EcsEngine, aws: Aws) -> None:
    tasks = [described(f"arn:{index:03}", f"endpoints/e/replicas/r{index:03}") for index in range(150)]
    arns = [task["taskArn"] for task in tasks]
    aws.lists(arns[:100], arns[100:])
    aws.describes(*tasks[:100])
    aws.describes(*tasks[100:])
    assert len(await engine.observe()) == 150


@pytest.mark.parametrize("call", ["list_tasks", "describe_tasks"])
async def test_an_error_is_silence_and_not_an_empty_cluster(engine: EcsEngine, aws: Aws, call: str) -> None:
    if call == "describe_tasks":
        aws.lists(["arn:1"])
    aws.stub.add_client_error(call, "ThrottlingException", "Rate exceeded")
    with pytest.raises(EngineUnavailableError, match="Rate exceeded"):
        await engine.observe()


async def test_a_task_that_cannot_be_described_is_not_gone(engine: EcsEngine, aws: Aws) -> None:
    aws.lists(["arn:1"])
    aws.describes(of=["arn:1"], missing="ACCESS_DENIED")
    with pytest.raises(EngineUnavailableError, match="ACCESS_DENIED"):
        await engine.observe()
    aws.lists(["arn:1"])
    aws.describes(of=["arn:1"], missing="MISSING")
    assert await engine.observe() == {}


async def test_what_stopped_is_described_once_and_shown_until_it_is_removed(
    engine: EcsEngine, aws: Aws
) -> None:
    aws.lists(stopped=["arn:1"])
    aws.describes(described("arn:1", status="STOPPED"))
    assert await engine.observe() == {ONE: Sighting(WorkerLife.ENDED, 0, "exit code 0")}
    aws.lists(stopped=["arn:1"])
    assert (await engine.observe())[ONE].life is WorkerLife.ENDED
    await engine.apply([Remove(ONE)])
    aws.lists(stopped=["arn:1"])
    assert await engine.observe() == {}


async def test_a_task_that_is_not_listed_yet_is_looked_at_by_its_name(engine: EcsEngine, aws: Aws) -> None:
    aws.runs({"tasks": [{"taskArn": "arn:1"}], "failures": []})
    assert await engine.apply([start()]) == {}
    aws.lists()
    aws.describes(described("arn:1", status="PROVISIONING"))
    assert (await engine.observe())[ONE].life is WorkerLife.STARTING
    await engine.apply([start()])


async def test_a_task_that_was_started_twice_is_stopped_but_for_the_older(
    engine: EcsEngine, aws: Aws
) -> None:
    aws.lists(["arn:1", "arn:2"])
    aws.describes(described("arn:1"), described("arn:2", age=60))
    aws.stops("arn:1")
    assert await engine.observe() == {ONE: Sighting(WorkerLife.READY)}
    aws.stops("arn:2")
    await engine.apply([Kill(ONE)])


async def test_want_of_a_gpu_is_waited_for_with_its_reason(engine: EcsEngine, aws: Aws) -> None:
    """One request tells that there is no room; the other replicas of the template wait with it."""
    no_room = {"tasks": [], "failures": [{"arn": "arn:host", "reason": "RESOURCE:GPU"}]}
    aws.runs(no_room)
    assert await engine.apply([start(), start(TWO)]) == {}
    aws.lists()
    waiting = Sighting(WorkerLife.WAITING, reason="ECS has no room: RESOURCE:GPU")
    assert await engine.observe() == {ONE: waiting, TWO: waiting}
    await engine.apply([Remove(TWO)])
    aws.runs({"tasks": [{"taskArn": "arn:1"}], "failures": []})
    await engine.apply([start()])
    aws.lists(["arn:1"])
    aws.describes(described("arn:1"))
    assert await engine.observe() == {ONE: Sighting(WorkerLife.READY)}


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("InvalidParameterException", "No Container Instances were found in your cluster."),
        ("LimitExceededException", "The limit for the resource has been exceeded."),
    ],
)
async def test_a_cluster_without_hosts_may_get_some(
    engine: EcsEngine, aws: Aws, code: str, said: str
) -> None:
    aws.stub.add_client_error("run_task", code, said)
    assert await engine.apply([start()]) == {}
    aws.lists()
    assert (await engine.observe())[ONE] == Sighting(WorkerLife.WAITING, reason=f"{code}: {said}")


async def test_what_will_never_start_says_why(engine: EcsEngine, aws: Aws) -> None:
    aws.stub.add_client_error("run_task", "ClientException", "TaskDefinition not found.")
    assert await engine.apply([start()]) == {ONE: "ClientException: TaskDefinition not found."}
    other = Start(start().order, "other")
    assert await engine.apply([other]) == {ONE: "this adapter has no template other"}


@pytest.mark.parametrize("code", ["ThrottlingException", "AccessDeniedException", "ExpiredTokenException"])
async def test_a_no_that_is_not_for_ever_is_waited_for_and_holds_up_no_other(
    engine: EcsEngine, aws: Aws, code: str
) -> None:
    aws.lists(["arn:2"])
    aws.describes(described("arn:2", TWO))
    await engine.observe()
    aws.stops("arn:2")
    aws.stub.add_client_error("run_task", code, "not now")
    assert await engine.apply([Kill(TWO), start()]) == {}
    aws.lists()
    assert (await engine.observe())[ONE] == Sighting(WorkerLife.WAITING, reason=f"{code}: not now")


async def test_an_error_of_ecs_itself_tells_nothing_and_holds_up_no_other(
    engine: EcsEngine, aws: Aws
) -> None:
    """Perhaps the task was started: so it is no wait either, which could be given up."""
    aws.lists(["arn:2"])
    aws.describes(described("arn:2", TWO))
    await engine.observe()
    aws.stub.add_client_error("stop_task", "ServerException", "of its own", http_status_code=500)
    aws.stub.add_client_error("run_task", "ServerException", "of its own", http_status_code=500)
    aws.runs({"tasks": [{"taskArn": "arn:3"}], "failures": []}, THREE)
    with pytest.raises(StepsFailedError, match="of its own") as caught:
        await engine.apply([Kill(TWO), start(), start(THREE)])
    assert set(caught.value.failed) == {ONE, TWO}
    aws.lists(["arn:3"])
    aws.describes(described("arn:3", THREE))
    assert set(await engine.observe()) == {THREE}


async def test_a_task_that_is_gone_needs_no_stop(engine: EcsEngine, aws: Aws) -> None:
    aws.lists(["arn:1"])
    aws.describes(described("arn:1"))
    await engine.observe()
    aws.stub.add_client_error("stop_task", "InvalidParameterException", "The referenced task was not found.")
    await engine.apply([Finish(ONE, 30.0)])
    aws.stub.add_client_error("stop_task", "ServerException", "later")
    with pytest.raises(EngineUnavailableError, match="later"):
        await engine.apply([Kill(ONE)])


async def test_an_api_that_does_not_answer_is_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    client = open_client("eu-west-1", "http://127.0.0.1:9")
    engine = EcsEngine(SETTINGS, EcsCalls(client, "c"))
    for call in (engine.observe(), engine.apply([start()])):
        with pytest.raises(EngineUnavailableError, match="Could not connect") as caught:
            await call
        assert "secret" not in str(caught.value)
    client.close()


def test_without_a_region_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "no-such-file")
    with pytest.raises(InvalidArgumentError, match="region"):
        open_client("", "")


async def test_without_the_library_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuscale.autoscaler.adapters.main.find_spec", lambda name: None)
    with pytest.raises(FailedPreconditionError, match=r"gpuscale\[ecs\]"):
        async with open_adapter(SETTINGS, autoscaler=AsyncMock(), clock=SystemClock()):
            pass


@pytest.mark.parametrize(
    ("checked", "probes"), [([True], True), ([True, False], False), ([], False)], ids=["all", "some", "none"]
)
async def test_it_tells_truly_what_it_can_do(
    checked: list[bool], probes: bool, client: "ECSClient", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{EcsCalls.__module__}.open_client", lambda *_: client)
    tables = {f"t{index}": TEMPLATE | {"has_health_check": one} for index, one in enumerate(checked)}
    settings = EcsSettings.model_validate({"data_dir": "d", "ecs_templates": tables})
    async with settings.open_engine(Host(SystemClock())) as opened:
        assert opened.capabilities == api.AdapterCapabilities(
            gives_gpus=True, picks_victims=True, probes=probes
        )
