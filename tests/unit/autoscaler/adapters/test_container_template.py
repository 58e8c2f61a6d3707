"""What is asked of a container engine for a replica, exactly; and what a template may never ask for."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from gpuscale.autoscaler.adapters.engine import LaunchRefusedError, ReplicaOrder
from gpuscale.autoscaler.adapters.engines.container import containers
from gpuscale.autoscaler.adapters.engines.container.engine import ContainerSettings

ORDER = ReplicaOrder("endpoints/chat/replicas/r1", "endpoints/chat", {"queue": "jobs"})
GPUS = ("GPU-8f3c", "GPU-11aa")
ON_GPUS = replace(ORDER, gpu_uuids=GPUS, gpu_count=2, fence=7)
IMAGE = "registry.example/llm/worker:1"


def request(order: ReplicaOrder = ORDER, **table: object) -> dict[str, containers.Json]:
    template = containers.ContainerTemplate.model_validate(
        {"image": IMAGE, "command": ["worker", "--queue", "{queue}"], **table}
    )
    return containers.container_request("here", "worker", template, order, {"TOKEN": "t"}, 4096)


def host(**table: object) -> dict[str, containers.Json]:
    found = request(**table)["HostConfig"]
    assert isinstance(found, dict)
    return found


def test_the_whole_request_for_a_replica_on_gpus() -> None:
    assert request(ON_GPUS) == {
        "Image": IMAGE,
        "Cmd": ("worker", "--queue", "jobs"),
        "Env": [
            "GPUSCALE_ENDPOINT=endpoints/chat", "GPUSCALE_REPLICA=endpoints/chat/replicas/r1",
            "GPUSCALE_FENCE=7", "GPUSCALE_GPU_UUIDS=GPU-8f3c,GPU-11aa", "GPUSCALE_RESERVATION=",
        ],
        "Labels": {
            "gpuscale.adapter": "here",
            "gpuscale.endpoint": "endpoints/chat",
            "gpuscale.fence": "7",
            "gpuscale.gpu-uuids": "GPU-8f3c,GPU-11aa",
            "gpuscale.metrics": "",
            "gpuscale.replica": "endpoints/chat/replicas/r1",
        },
        "HostConfig": {
            "Privileged": False,
            "SecurityOpt": ["no-new-privileges"],
            "CapDrop": ["ALL"],
            "NetworkMode": "bridge",
            "RestartPolicy": {"Name": "no"},
            "AutoRemove": False,
            "Init": False,
            "PidsLimit": 4096,
            "LogConfig": {"Type": "json-file", "Config": {"max-size": "4096", "max-file": "2"}},
            "DeviceRequests": [{"Driver": "nvidia", "DeviceIDs": [*GPUS], "Capabilities": [["gpu"]]}],
        },
    }  # fmt: skip


def test_where_its_server_shows_metrics_is_kept_with_the_container() -> None:
    order = replace(ORDER, parameters={"port": "8000"})
    metrics = {"port": "{port:int}", "path": "/m"}
    found = request(order, command=["serve", "{port:int}"], metrics=metrics)
    assert found["Cmd"] == ("serve", "8000")
    assert found["Labels"]["gpuscale.metrics"] == "8000/m"


def test_a_replica_without_gpus_asks_for_none_and_gets_none_through_its_image() -> None:
    found = request()
    assert "DeviceRequests" not in host()
    assert isinstance(found["Env"], list)
    assert "NVIDIA_VISIBLE_DEVICES=void" in found["Env"]


def test_everything_that_a_template_may_ask_for() -> None:
    found = request(
        entrypoint=["/usr/bin/env"], env={"COLOR": "green"}, pass_env=["TOKEN"],
        user="1000:1000", stop_signal="SIGINT", memory="2GiB", cpus=1.5, shm_size="1GiB", pids=100,
        health_check={"command": ["probe", "{queue}"], "period": 2, "timeout": 1, "failures": 4},
        network="host", init=True, read_only=True, drop_capabilities=False,
        mounts=[{"source": "/srv/models", "target": "/models"}],
    )  # fmt: skip
    assert found["Entrypoint"] == ("/usr/bin/env",)
    assert isinstance(found["Env"], list)
    assert {"COLOR=green", "TOKEN=t"} <= set(found["Env"])
    assert (found["User"], found["StopSignal"]) == ("1000:1000", "SIGINT")
    assert found["Healthcheck"] == {
        "Test": ["CMD", "probe", "jobs"],
        "Interval": 2_000_000_000,
        "Timeout": 1_000_000_000,
        "Retries": 4,
        "StartPeriod": 300_000_000_000,
    }
    limits = found["HostConfig"]
    assert limits["Memory"] == limits["MemorySwap"] == 2 << 30
    assert (limits["NanoCpus"], limits["ShmSize"], limits["PidsLimit"]) == (1_500_000_000, 1 << 30, 100)
    assert (limits["Init"], limits["ReadonlyRootfs"], limits["CapDrop"]) == (True, True, [])
    assert limits["NetworkMode"] == "host"
    assert limits["Mounts"] == [
        {
            "Type": "bind", "Source": "/srv/models", "Target": "/models", "ReadOnly": True,
            "BindOptions": {"Propagation": "rprivate"},
        }
    ]  # fmt: skip


def test_an_image_can_be_kept_from_asking_about_its_health() -> None:
    assert request(health_check={"command": []})["Healthcheck"] == {"Test": ["NONE"]}


@pytest.mark.parametrize(
    ("order", "table", "why"),
    [
        (replace(ORDER, parameters={}), {}, "needs the parameter queue"),
        (replace(ORDER, parameters={"queue": "-x"}), {}, "must not begin with '-'"),
        (replace(ORDER, parameters={"queue": "q", "image": "evil"}), {}, "no placeholder {image}"),
        (ORDER, {"pass_env": ["ABSENT"]}, "passes on ABSENT"),
    ],
    ids=["missing", "option", "unknown", "variable"],
)
def test_what_cannot_be_started_says_why(order: ReplicaOrder, table: dict[str, object], why: str) -> None:
    with pytest.raises(LaunchRefusedError, match=why):
        request(order, **table)


@pytest.mark.parametrize(
    "table",
    [
        {"privileged": True},
        {"cap_add": ["SYS_ADMIN"]},
        {"devices": ["/dev/nvidia0"]},
        {"network": "container:other"},
        {"network": "ns:/proc/1/ns/net"},
        {"env": {"CUDA_VISIBLE_DEVICES": "0"}},
        {"pass_env": ["NVIDIA_VISIBLE_DEVICES"]},
        {"env": {"GPUSCALE_FENCE": "1"}},
        {"command": ["{program}"]},
        {"health_check": {"command": ["{program}"]}},
        {"image": "bad image"},
        {"user": "root --privileged"},
        {"stop_signal": "SIGKILL"},
        {"memory": "much"},
        {"shm_size": "-1"},
        *(
            {"mounts": [{"source": source, "target": "/x"}]}
            for source in (
                "/", "/var", "/run/docker.sock", "/proc", "/etc/ssl", "/srv/../etc", "srv", "//etc",
            )
        ),
        {"mounts": [{"source": "/srv", "target": "x"}]},
    ],
    ids=str,
)  # fmt: skip
def test_what_no_template_may_ask_for(table: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        containers.ContainerTemplate.model_validate({"image": IMAGE, **table})


def adapter(**table: object) -> ContainerSettings:
    return ContainerSettings.model_validate({"data_dir": Path("x"), "node": "here", **table})


@pytest.mark.parametrize(
    ("patterns", "allowed"),
    [
        ([], False),
        (["registry.example/llm/worker:1"], True),
        (["registry.example/llm/*"], True),
        (["registry.example/*"], False),
        (["*"], False),
        (["registry.example/llm/worker@sha256:*"], False),
        (["registry.example/llm/worker"], False),
        (["registryXexample/llm/worker:1"], False),
        (["other/llm/worker:1", "registry.example/*/worker:*"], True),
    ],
    ids=str,
)
def test_an_image_that_no_pattern_lets_through_is_refused_before_anything_runs(
    patterns: list[str], allowed: bool
) -> None:
    table = {"allowed_images": patterns, "container_templates": {"worker": {"image": IMAGE}}}
    if allowed:
        assert adapter(**table).container_templates["worker"].image == IMAGE
    else:
        with pytest.raises(ValidationError, match="allowed_images"):
            adapter(**table)


def test_no_pattern_of_images_takes_long() -> None:
    """A matcher that goes back and tries again takes seconds for five stars, and for ten longer than anybody waits."""
    began = time.thread_time()
    assert not containers.is_allowed("a" * 255, ["*a*a*a*a*b"])
    assert time.thread_time() - began < 0.5


@pytest.mark.parametrize(
    "table",
    [
        {"engine": "tcp://127.0.0.1:2375"},
        {"engine": "unix://run/docker.sock"},
        {"node": "Not An Id"},
        {"container_templates": {"Not An Id": {"image": IMAGE}}, "allowed_images": [IMAGE]},
    ],
    ids=str,
)
def test_settings_of_no_use_are_refused(table: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        adapter(**table)
