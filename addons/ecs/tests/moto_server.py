"""A private double of AWS (moto's server) on the loopback address, with a cluster of ECS in it."""

import os
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

import httpx

from tests.support.guarded import GuardedFolder, PrivateServer
from tests.support.ports import free_port
from tests.support.waiting import eventually_sync

if TYPE_CHECKING:
    from types_boto3_ecs import ECSClient

START_TIMEOUT_S = 120.0
REGION = "eu-west-1"
FAMILY = "worker"
CONTAINER = "main"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "not-a-key",
    "AWS_SECRET_ACCESS_KEY": "not-a-secret",
    "AWS_CONFIG_FILE": "no-such-file",
    "AWS_SHARED_CREDENTIALS_FILE": "no-such-file",
    "AWS_EC2_METADATA_DISABLED": "true",
}


def why_unavailable() -> str | None:
    """Why no double of AWS can run here, or None if one can."""
    missing = [name for name in ("boto3", "moto", "flask", "flask_cors") if find_spec(name) is None]
    return f"the double of AWS needs {missing[0]} (requirements-dev.txt)" if missing else None


class MotoServer(PrivateServer):
    """The server as a process; use it as a context manager. Its state is in memory."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._folder = GuardedFolder("gpuscale-moto-")

    def start(self) -> None:
        """Start it and wait until it answers."""
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self._folder.spawn("moto", command, {**os.environ, **CREDENTIALS})

        def answers() -> bool:
            return httpx.get(f"{self.url}/moto-api/", timeout=5).status_code < 500

        eventually_sync(answers, START_TIMEOUT_S, retry_on=(httpx.TransportError,))
        # By itself a task of moto's goes one step towards its end whenever it is looked at.
        stays = {"model_name": "ecs::task", "transition": {"progression": "manual", "times": 1_000_000_000}}
        httpx.post(
            f"{self.url}/moto-api/state-manager/set-transition", json=stays, timeout=30
        ).raise_for_status()

    def prepare(self, cluster: str) -> "ECSClient":
        """Make a cluster and the task definition `FAMILY` with one container; returns a client."""
        import boto3

        client = boto3.session.Session(
            aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        ).client("ecs", region_name=REGION, endpoint_url=self.url)
        client.create_cluster(clusterName=cluster)
        client.register_task_definition(
            family=FAMILY, containerDefinitions=[{"name": CONTAINER, "image": "worker", "memory": 128}]
        )
        return client

    def close(self) -> None:
        """End it and remove its files."""
        self._folder.close()
