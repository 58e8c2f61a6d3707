"""What `reserve` sends: what was not said is left to the server."""

import os
import signal
import uuid
from typing import Any

import pytest

from gpuscale.api.allocator import v1 as api
from gpuscale.client import ask, reserve_request
from gpuscale.client.asks import RunOptions, default_holder, job_request, moving
from gpuscale.client.client import reserve_timeout
from gpuscale.common.errors import InvalidArgumentError


def test_what_was_not_said_is_absent() -> None:
    request = reserve_request(2, "me", {})
    assert (request.ask.gpu_count, request.holder) == (2, "me")
    assert str(uuid.UUID(request.request_id)) == request.request_id
    assert [field.name for field, _ in request.ask.ListFields()] == ["gpu_count"]
    assert {field.name for field, _ in request.ListFields()} == {"request_id", "holder", "ask"}


def test_every_call_has_its_own_request_id() -> None:
    assert reserve_request(1, "me", {}).request_id != reserve_request(1, "me", {}).request_id


def test_what_was_said_is_sent() -> None:
    wishes: dict[str, object] = {
        "ttl": 1.5, "min_memory": 0, "max_utilization_percent": 100.0, "allow_unknown_utilization": True,
        "nodes": ["nodes/a"], "labels": {"team": "x"}, "request_id": "r",
    }  # fmt: skip
    request = reserve_request(1, "me", wishes)
    assert (request.ttl.seconds, request.ttl.nanos) == (1, 500_000_000)
    assert request.ask.HasField("min_memory_bytes")
    assert request.ask.max_utilization_percent == 100
    assert request.ask.allow_unknown_utilization
    assert (list(request.ask.nodes), dict(request.labels)) == (["nodes/a"], {"team": "x"})
    assert request.request_id == "r"


def test_sizes_and_durations_may_be_text() -> None:
    sizes = {"min_memory": "8GiB", "gpu_memory": "1GB", "host_memory": 7}
    said = reserve_request(1, "me", {"ttl": "1m30s", "wait": "250ms"} | sizes)
    assert (said.ttl.seconds, said.wait.nanos) == (90, 250_000_000)
    assert (said.ask.min_memory_bytes, said.ask.gpu_memory_bytes) == (8 << 30, 10**9)
    assert said.ask.host_memory_bytes == 7
    assert reserve_timeout({"wait": "1m"}) == 70


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"ttl": "30 seconds"}, ValueError, "ttl: '30 seconds' is not a duration; write it like 60s"),
        ({"gpu_memory": "many"}, ValueError, "gpu_memory: 'many' is not a size"),
    ],
)
def test_what_is_no_size_or_duration_is_named(options: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        reserve_request(1, "me", options)


def test_every_field_of_the_contract_can_be_said() -> None:
    """All but `weights`, which are for the operator's settings, and `job`, `keep_place` and `movable`, which programs send."""
    wishes: dict[str, object] = {
        "min_memory": 1, "max_utilization_percent": 9.0, "allow_unknown_utilization": True, "gpu_milli": 500,
        "gpu_memory": 3, "mig_profile": "1g.10gb", "models": ["A100"], "cpu_milli": 4000, "host_memory": 5,
        "nodes": ["nodes/a"], "excluded_nodes": ["nodes/b"], "only_gpus": ["nodes/a/gpus/g"],
        "excluded_gpus": ["nodes/a/gpus/h"], "node_labels": {"zone": "x"}, "apart_from": {"job": "y"},
        "gpu_set": "nvlink", "power_limit_watts": 300, "member_count": 3, "gang_strategy": "strict_spread",
        "policy": "pack",
    }  # fmt: skip
    said = ask(2, wishes)
    set_fields = {field.name for field, _ in said.ListFields()}
    assert set(api.Ask.DESCRIPTOR.fields_by_name) - set_fields == {"weights"}
    assert said.policy == api.PlacementPolicy.PLACEMENT_POLICY_PACK
    assert said.gpu_set == api.GpuSet.GPU_SET_NVLINK
    request = reserve_request(
        1,
        "me",
        {"ttl": 5, "wait": 2.5, "tenant": "t", "priority": -1, "preemptible": True, "may_preempt": True,
         "labels": {"a": "b"}, "gpu_milli": 250, "owner": "ada", "time_limit": "1h", "booking": "demo"},
    )  # fmt: skip
    said_fields = {field.name for field, _ in request.ListFields()}
    assert set(api.ReserveRequest.DESCRIPTOR.fields_by_name) - said_fields == {"job", "keep_place", "movable"}


@pytest.mark.parametrize(
    ("options", "error"),
    [({"gpus_count": 2}, TypeError), ({"ttl": 2}, TypeError), ({"policy": "best"}, ValueError)],
)
def test_what_is_no_option_of_an_ask_is_refused(options: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        ask(1, options)


@pytest.mark.parametrize("limit", [0, "0s", 0.5])
def test_a_time_limit_that_no_command_can_keep_is_refused(limit: float | str) -> None:
    with pytest.raises(InvalidArgumentError, match="time_limit must be at least 1s"):
        job_request(["train"], 1, 1, {"time_limit": limit})


def test_a_call_that_waits_has_time_to_wait() -> None:
    assert reserve_timeout({}) is None
    assert reserve_timeout({"wait": 0}) is None
    assert reserve_timeout({"wait": 60}) == 70


def test_a_user_without_a_name_holds_under_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container the user is often just a number."""

    def unknown() -> str:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr("getpass.getuser", unknown)
    assert default_holder().partition("@")[0] == str(os.getuid())


@pytest.mark.parametrize(("on_move", "takes"), [("signal:USR1", 60), ("signal:SIGUSR1,grace:90s", 90)])
def test_a_job_of_one_member_that_saves_its_work_may_be_moved(on_move: str, takes: int) -> None:
    options: RunOptions = {"on_move": on_move}
    assert job_request(["train"], 1, 1, options).movable.seconds == takes
    assert moving(options) == {"on_move": signal.SIGUSR1, "move_grace": float(takes % 60 and takes)}
    for members, said in ((2, options), (1, RunOptions())):
        assert not job_request(["train"], 1, members, said).HasField("movable")


@pytest.mark.parametrize("on_move", ["USR1", "signal:KILL", "signal:USR1,grace:soon", "signal:USR1,grace:0s"])
def test_what_is_no_signal_to_save_work_by_is_refused_by_name(on_move: str) -> None:
    with pytest.raises(ValueError, match=r"^on_move: "):
        moving({"on_move": on_move})
