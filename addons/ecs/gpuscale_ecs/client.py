"""The calls of ECS that the adapter makes, in threads, and their errors; the only file that imports boto3.

Credentials come from boto3's usual chain: variables, files, the role of the task or the host.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, TypeVar

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from gpuscale.autoscaler.adapters.engine import EngineUnavailableError, LaunchRefusedError
from gpuscale.common import names
from gpuscale.common.errors import InvalidArgumentError
from gpuscale_ecs.tasks import CHECKED_TAG, REPLICA_TAG, NoRoomError, Task

if TYPE_CHECKING:
    from types_boto3_ecs import ECSClient
    from types_boto3_ecs.type_defs import ContainerTypeDef, RunTaskRequestTypeDef, TaskTypeDef

CONNECT_TIMEOUT = 3.0
READ_TIMEOUT = 8.0
ATTEMPTS = 2
DESCRIBED_AT_ONCE = 100
"""Tasks that one DescribeTasks takes at most."""

_CLIENT_ERRORS = 4
"""Hundreds of the HTTP status of a refusal."""
_MISSING = "MISSING"
_NO_SUCH_TASK = "task was not found"
_NO_INSTANCES = "No Container Instances were found"
_NEVER = frozenset(
    {
        "ClientException",
        "InvalidParameterException",
        "PlatformTaskDefinitionIncompatibilityException",
        "PlatformUnknownException",
        "UnsupportedFeatureException",
    }
)
_Desired = Literal["RUNNING", "STOPPED"]
T = TypeVar("T")


class EcsCalls:
    """One cluster.

    Every method raises EngineUnavailableError if there is no answer: nobody knows what is there, or whether it was done.
    """

    def __init__(self, client: "ECSClient", cluster: str) -> None:
        self._client = client
        self._cluster = cluster

    async def list_arns(self, starter: str) -> list[str]:
        """Every task that `starter` started, including those that stopped within about the last hour."""
        paginator = self._client.get_paginator("list_tasks")
        desired: tuple[_Desired, ...] = ("RUNNING", "STOPPED")

        def listed() -> list[str]:
            # Running ones first: a task that stops meanwhile is in one of the two lists, or in both.
            pages = (
                page
                for status in desired
                for page in paginator.paginate(cluster=self._cluster, startedBy=starter, desiredStatus=status)
            )
            return list(dict.fromkeys(arn for page in pages for arn in page["taskArns"]))

        return await asyncio.to_thread(_answered, listed)

    async def describe(self, arns: Sequence[str]) -> list[Task]:
        """The tasks among these that ECS still knows and that run a replica."""

        def described() -> list[Task]:
            found: list[TaskTypeDef] = []
            for start in range(0, len(arns), DESCRIBED_AT_ONCE):
                answer = self._client.describe_tasks(
                    cluster=self._cluster, tasks=arns[start : start + DESCRIBED_AT_ONCE], include=["TAGS"]
                )
                for failure in answer["failures"]:
                    if failure.get("reason") != _MISSING:
                        raise EngineUnavailableError(f"ECS does not tell of a task: {failure.get('reason')}")
                found += answer["tasks"]
            return [task for task in map(to_task, found) if task is not None]

        return await asyncio.to_thread(_answered, described)

    async def run(self, request: "RunTaskRequestTypeDef") -> str:
        """Start a task, or find the one that an equal request has started; returns its ARN.

        Raises:
            LaunchRefusedError: it will never be started.
            NoRoomError: not now.
        """
        try:
            answer = await asyncio.to_thread(self._client.run_task, **request)
        except ClientError as error:
            code, why = error_of(error)
            if code in _NEVER and _NO_INSTANCES not in why:
                raise LaunchRefusedError(why) from error
            # Refused for now, such as by a limit, a missing right, or too many calls. Nothing was started.
            if error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0) // 100 == _CLIENT_ERRORS:
                raise NoRoomError(why) from error
            raise EngineUnavailableError(why) from error
        except BotoCoreError as error:
            raise EngineUnavailableError(str(error)) from error
        for task in answer["tasks"]:
            return task.get("taskArn", "")
        failures = answer["failures"]
        reasons = {f"{one.get('reason', '')} {one.get('detail', '')}".strip() for one in failures}
        raise NoRoomError(f"ECS has no room: {', '.join(sorted(reasons)) or 'no reason is given'}")

    async def stop(self, arn: str) -> None:
        """Stop a task: SIGTERM, then SIGKILL after the time of its task definition; harmless if it has stopped."""

        def stopped() -> None:
            try:
                self._client.stop_task(cluster=self._cluster, task=arn, reason="stopped by gpuscale")
            except ClientError as error:
                if _NO_SUCH_TASK not in error_of(error)[1]:
                    raise

        await asyncio.to_thread(_answered, stopped)


def open_client(region: str, endpoint_url: str) -> "ECSClient":
    """A client of boto3; its usual chain fills in what is empty. Blocking.

    Raises:
        InvalidArgumentError: the chain names no region, or the address is invalid.
    """
    config = Config(
        connect_timeout=CONNECT_TIMEOUT,
        read_timeout=READ_TIMEOUT,
        retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
    )
    try:
        client: ECSClient = boto3.session.Session().client(
            "ecs", region_name=region or None, endpoint_url=endpoint_url or None, config=config
        )
    except (BotoCoreError, ValueError) as error:
        raise InvalidArgumentError(f"cannot call ECS: {error}", field="region") from error
    return client


def to_task(found: "TaskTypeDef") -> Task | None:
    """A task as ECS describes it; None for one that runs no replica."""
    tags = {tag.get("key"): tag.get("value", "") for tag in found.get("tags", ())}
    replica = tags.get(REPLICA_TAG, "")
    arn, created = found.get("taskArn"), found.get("createdAt")
    if arn is None or names.match(names.REPLICA, replica) is None:
        return None
    # The container that the request was about.
    overrides = found.get("overrides", {}).get("containerOverrides", [])
    overridden = {override.get("name") for override in overrides}
    nothing: ContainerTypeDef = {}
    containers = found.get("containers", [])
    container = next((item for item in containers if item.get("name") in overridden), nothing)
    return Task(
        arn=arn,
        replica=replica,
        status=found.get("lastStatus", ""),
        created=created.timestamp() if created else 0.0,
        checked=CHECKED_TAG in tags,
        health=found.get("healthStatus", "UNKNOWN"),
        exit_code=container.get("exitCode"),
        stop_code=found.get("stopCode", ""),
        reason=container.get("reason") or found.get("stoppedReason", ""),
    )


def error_of(error: ClientError) -> tuple[str, str]:
    """The code and the message of an error that ECS answered."""
    said = error.response.get("Error", {})
    code = said.get("Code", "")
    return code, f"{code}: {said.get('Message', '')}"


def _answered(call: Callable[[], T]) -> T:
    """What a call returns; every error of boto3 becomes EngineUnavailableError. Blocking."""
    try:
        return call()
    except ClientError as error:
        raise EngineUnavailableError(error_of(error)[1]) from error
    except BotoCoreError as error:
        raise EngineUnavailableError(str(error)) from error
