"""The calls of ECS that the adapter makes, in threads, and what becomes of their errors. The only module that knows boto3.

Credentials come by boto3's usual chain (variables, files, the role of the task or the host) and go nowhere else.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, TypeVar

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from gpuscale.autoscaler.adapters.engine import EngineUnavailableError
from gpuscale.autoscaler.adapters.engines.ecs.tasks import (
    CHECKED_TAG,
    REPLICA_TAG,
    NoRoomError,
    Task,
    TaskRefusedError,
)
from gpuscale.common import names
from gpuscale.common.errors import InvalidArgumentError

if TYPE_CHECKING:
    from types_boto3_ecs import ECSClient
    from types_boto3_ecs.type_defs import ContainerTypeDef, RunTaskRequestTypeDef, TaskTypeDef

CONNECT_TIMEOUT = 3.0
READ_TIMEOUT = 8.0
ATTEMPTS = 2
DESCRIBED_AT_ONCE = 100
"""Tasks that one DescribeTasks takes at most."""

_CLIENT_ERRORS = 4
"""Hundreds of the HTTP status of an answer that says no."""
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

    Every method raises EngineUnavailableError where there is no answer: nobody knows what is there, or whether it was done.

    Args:
        client: of boto3; it may be used by several threads.
        cluster: its name or ARN.
    """

    def __init__(self, client: "ECSClient", cluster: str) -> None:
        self._client = client
        self._cluster = cluster

    async def list_arns(self, starter: str) -> list[str]:
        """Every task that `starter` started, those too that stopped within about the last hour."""
        return await asyncio.to_thread(_answered, lambda: list(self._list(starter)))

    async def describe(self, arns: Sequence[str]) -> list[Task]:
        """Those of the tasks that ECS still knows and that run a replica."""
        return await asyncio.to_thread(_answered, lambda: list(self._describe(arns)))

    async def run(self, request: "RunTaskRequestTypeDef") -> str:
        """Start a task, or find the one that an equal request has started; returns its ARN.

        Raises:
            TaskRefusedError: it will never be started.
            NoRoomError: not now.
        """
        return await asyncio.to_thread(self._run, request)

    async def stop(self, arn: str) -> None:
        """Have a task end: SIGTERM, and SIGKILL after the time that its task definition says; harmless if it has ended."""
        await asyncio.to_thread(_answered, lambda: self._stop(arn))

    def _list(self, starter: str) -> Iterator[str]:
        """Those that should run first: a task on its way from one list to the other is in one of them."""
        seen: set[str] = set()
        desired: tuple[_Desired, ...] = ("RUNNING", "STOPPED")
        for status in desired:
            pages = self._client.get_paginator("list_tasks").paginate(
                cluster=self._cluster, startedBy=starter, desiredStatus=status
            )
            for page in pages:
                for arn in page["taskArns"]:
                    if arn not in seen:
                        seen.add(arn)
                        yield arn

    def _describe(self, arns: Sequence[str]) -> Iterator[Task]:
        for start in range(0, len(arns), DESCRIBED_AT_ONCE):
            answer = self._client.describe_tasks(
                cluster=self._cluster, tasks=arns[start : start + DESCRIBED_AT_ONCE], include=["TAGS"]
            )
            for failure in answer["failures"]:
                if failure.get("reason") != _MISSING:
                    raise EngineUnavailableError(f"ECS does not tell of a task: {failure.get('reason')}")
            for found in answer["tasks"]:
                if (task := to_task(found)) is not None:
                    yield task

    def _run(self, request: "RunTaskRequestTypeDef") -> str:
        try:
            answer = self._client.run_task(**request)
        except ClientError as error:
            code, why = error_of(error)
            if code in _NEVER and _NO_INSTANCES not in why:
                raise TaskRefusedError(why) from error
            # A no that is not for ever: a limit, a right that is missing, too many calls. Nothing was started.
            if error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0) // 100 == _CLIENT_ERRORS:
                raise NoRoomError(why) from error
            raise EngineUnavailableError(why) from error
        except BotoCoreError as error:
            raise EngineUnavailableError(str(error)) from error
        for task in answer["tasks"]:
            return task.get("taskArn", "")
        reasons = {f"{one.get('reason', '')} {one.get('detail', '')}".strip() for one in answer["failures"]}
        raise NoRoomError(f"ECS has no room: {', '.join(sorted(reasons)) or 'no reason is given'}")

    def _stop(self, arn: str) -> None:
        try:
            self._client.stop_task(cluster=self._cluster, task=arn, reason="stopped by gpuscale")
        except ClientError as error:
            if _NO_SUCH_TASK not in error_of(error)[1]:
                raise


def open_client(region: str, endpoint_url: str) -> "ECSClient":
    """A client of boto3; what is empty comes by its usual chain. Blocking.

    Raises:
        InvalidArgumentError: the chain names no region, or the address is none.
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
    container = _container(found)
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
    """The code and the words of an error that ECS answered."""
    said = error.response.get("Error", {})
    code = said.get("Code", "")
    return code, f"{code}: {said.get('Message', '')}"


def _container(found: "TaskTypeDef") -> "ContainerTypeDef":
    """The container that the request was about."""
    overrides = found.get("overrides", {}).get("containerOverrides", [])
    named = {one.get("name") for one in overrides}
    nothing: ContainerTypeDef = {}
    return next((one for one in found.get("containers", []) if one.get("name") in named), nothing)


def _answered(call: Callable[[], T]) -> T:
    """What a call returns; every error of boto3 means that nobody knows. Blocking."""
    try:
        return call()
    except ClientError as error:
        raise EngineUnavailableError(error_of(error)[1]) from error
    except BotoCoreError as error:
        raise EngineUnavailableError(str(error)) from error
