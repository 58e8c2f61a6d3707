"""The example of capability sets, from `apply` to worker processes that know what they are to offer."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuscale.api.autoscaler import v1 as api
from gpuscale.client import Client, connect
from tests.support.cli import run_cli
from tests.support.up import Up
from tests.support.waiting import eventually_sync

EXAMPLE = Path(__file__).parents[2] / "examples" / "capabilities.yaml"
WORKER = (
    "import os, time; print(os.environ['GPUSCALE_CAPABILITIES'], "
    "len(os.environ['GPUSCALE_GPU_UUIDS']) > 0, flush=True); time.sleep(600)"
)
CONFIG = f"""
[templates.task-worker]
command = ["{{python}}", "-c", "{WORKER}"]

[templates.gpu-worker]
command = ["{{python}}", "-c", "{WORKER}"]

[workers.gpu-worker]
capabilities = {{ cpu = 1, gpu = 1, high_memory = -1 }}
count = 2
"""


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    config = tmp_path_factory.mktemp("up") / "gpuscale.toml"
    config.write_text(CONFIG)
    with Up(config.parent, simulate=4, arguments=["--config", str(config)]) as running:
        yield running


def report(client: Client, **tasks: int) -> None:
    """Tasks that need a CPU, and tasks that need a GPU."""
    demands = [api.TaskDemand(capabilities={name: 1}, tasks=count) for name, count in tasks.items()]
    request = api.ReportMetricsRequest(name="endpoints/tasks", tasks=api.TaskReport(demands=demands))
    client.metrics.ReportMetrics(request)


def log(client: Client, replica: str) -> str:
    """What a replica wrote."""
    return client.endpoints.ReadReplicaLog(api.ReadReplicaLogRequest(name=replica)).content.decode().strip()


def test_each_set_has_as_many_processes_as_its_tasks_ask_for(up: Up) -> None:
    def ctl(*arguments: str) -> str:
        ran = run_cli("--address", up.address, *arguments)
        assert ran.code == 0, ran.err
        return ran.out

    def sets() -> dict[str, tuple[int, int]]:
        status: dict[str, Any] = json.loads(ctl("get", "endpoints", "tasks", "-o", "json"))["status"]
        return {
            one["id"]: (one.get("readyReplicas", 0), one.get("readyWorkers", 0))
            for one in status["capabilitySets"]
        }

    ctl("apply", "-f", str(EXAMPLE))
    with connect(up.address) as client:
        for tasks, wanted in (
            ({"cpu": 5, "gpu": 20}, {"cpu": (1, 1), "gpu": (2, 4)}),
            ({"cpu": 5}, {"cpu": (1, 1), "gpu": (2, 4)}),  # workers with a GPU can do that, too
            ({}, {"cpu": (1, 1), "gpu": (0, 0)}),
        ):

            def settled(tasks: dict[str, int] = tasks, wanted: object = wanted) -> bool:
                report(client, **tasks)
                return sets() == wanted

            eventually_sync(settled, timeout=60, interval=0.5)
            if tasks.get("gpu"):
                wide = ctl("get", "endpoints", "tasks", "-o", "wide")
                assert "cpu 1/1, gpu 2/2" in wide
                assert "2 x cpu=1,gpu=1,high_memory" in ctl("get", "replicas", "-o", "wide")
                told = ctl("explain", "endpoint", "tasks")
                assert "20 that need gpu=1" in told
                assert "gpu: 2 desired, 2 granted, 2 ready with 4 workers; each cpu=1,gpu=1" in told
                logs = {
                    (one.capability_set, log(client, one.name))
                    for one in client.endpoints.ListReplicas(api.ListReplicasRequest()).replicas
                }
                assert logs == {("cpu", "cpu=1 False"), ("gpu", "cpu=1,gpu=1 True")}


def test_a_person_scales_one_set_and_a_preset_makes_them(up: Up) -> None:
    def ctl(*arguments: str) -> Any:
        return run_cli("--address", up.address, *arguments)

    made = ctl(
        *(
            "preset",
            "show",
            "scaling=capability",
            "--template",
            "task-worker",
            "--min",
            "0",
            "--name",
            "made",
        ),
        *("--capability-set", "cpu:cpu=1", "--capability-set", "big:gpu=2,high_memory", "-o", "json"),
    )
    spec = json.loads(made.out)["spec"]
    assert [(one["id"], one["capabilities"]) for one in spec["capabilitySets"]] == [
        ("cpu", {"cpu": "1"}),
        ("big", {"gpu": "2", "high_memory": "-1"}),
    ]
    assert [one["template"].get("gpuCount", 0) for one in spec["capabilitySets"]] == [0, 2]
    manifest = up.folder / "made.json"
    manifest.write_text(made.out)
    assert ctl("apply", "-f", str(manifest)).code == 0
    assert ctl("scale", "endpoint", "made", "--replicas", "1").code != 0
    assert ctl("scale", "endpoint", "made", "--replicas", "1", "--capability-set", "big").code == 0
    bad = ctl("preset", "show", "scaling=capability", "--capability-set", "gpu=2")
    assert "write it like big:gpu=2,high_memory" in bad.err
