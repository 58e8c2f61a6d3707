"""Command templates: the operator writes what is run, the API only fills in values."""

import pytest
from pydantic import ValidationError

from gpuscale.autoscaler.adapters.engine import LaunchRefusedError, ReplicaOrder
from gpuscale.autoscaler.adapters.engines.container.containers import ContainerTemplate
from gpuscale.autoscaler.adapters.engines.process.engine import ProcessSettings, ProcessTemplate
from gpuscale.autoscaler.adapters.templates import (
    CommandTemplate,
    Launch,
    check_command,
    launch,
    parse_arguments,
)

PYTHON = "/venv/bin/python"


def order(**parameters: str) -> ReplicaOrder:
    return ReplicaOrder(
        "endpoints/jobs/replicas/r1", "endpoints/jobs", parameters, gpu_uuids=("GPU-a", "GPU-b"), fence=7
    )


def launched(command: list[str], **parameters: str) -> Launch:
    template = CommandTemplate(command=tuple(command))
    return launch("worker", template, order(**parameters), PYTHON, {"PATH": "/bin"})


def test_every_placeholder_is_filled_within_its_argument() -> None:
    shown = ["--at={endpoint}", "{replica}", "{gpu_count}x{gpu_uuids}", "--q", "{queue}", "{{x}}"]
    python, script, *filled = launched(["{python}", "w.py", *shown], queue="a b; rm -rf /").argv
    assert (python, script) == (PYTHON, "w.py")
    assert filled[:2] == ["--at=endpoints/jobs", "endpoints/jobs/replicas/r1"]
    assert filled[2:] == ["2xGPU-a,GPU-b", "--q", "a b; rm -rf /", "{x}"]


def test_a_value_is_not_read_as_a_template_again() -> None:
    assert launched(["/bin/prog", "{queue}"], queue="{python}").argv[1] == "{python}"


@pytest.mark.parametrize(
    ("command", "parameters", "says"),
    [
        (["/bin/prog", "{queue}"], {}, "template worker needs the parameter queue"),
        (["/bin/prog"], {"queue": "jobs"}, "template worker has no placeholder {queue}"),
        (["/bin/prog", "{replica}"], {"replica": "x"}, "parameter replica is set by the adapter"),
        (["/bin/prog", "{n:int}"], {"n": "12x"}, "parameter n of template worker must be a whole number"),
        (["/bin/prog", "{n:int}"], {"n": ""}, "must be a whole number"),
        (["/bin/prog", "{queue}"], {"queue": "--config=/etc/shadow"}, "must not begin with '-'"),
        (["/bin/prog", "{queue}"], {"queue": "a\nb"}, "printable"),
        (["/bin/prog", "{queue}"], {"queue": "a\0b"}, "printable"),
        (["/bin/prog", "{queue}"], {"queue": "x" * 1025}, "at most 1024"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_reason(
    command: list[str], parameters: dict[str, str], says: str
) -> None:
    with pytest.raises(LaunchRefusedError) as caught:
        launched(command, **parameters)
    assert says in str(caught.value)


def test_a_number_may_be_negative_and_a_text_may_begin_with_a_dash_inside_of_an_argument() -> None:
    assert launched(["/bin/prog", "{n:int}", "--q={q}"], n="-5", q="-x").argv[1:] == ("-5", "--q=-x")


@pytest.mark.parametrize(
    "command",
    [
        *([], [""], ["python", "x"], ["./prog"], ["{queue}"], ["/bin/{queue}"], ["{python}3"]),
        *(["/bin/prog", wrong] for wrong in ("{", "a}b", "{}", "{a b}", "{A}", "{a:float}", "{a!r}")),
        *(["/bin/prog", wrong] for wrong in ("{a.__class__}", "a\0b")),
    ],
)
def test_a_command_that_is_none_is_refused_when_the_file_is_read(command: list[str]) -> None:
    with pytest.raises(ValueError):
        check_command(command)
    with pytest.raises(ValidationError):
        ProcessTemplate.model_validate({"command": command})


SHELLS = [
    ["/bin/sh", "-c", "work {queue}"],
    ["/bin/bash", "-ec", "work '{queue}'"],
    ["/usr/bin/env", "bash", "-x", "-c", 'work "{queue}"'],
    ["/usr/bin/timeout", "5", "/bin/dash", "-c", "--", "{queue}"],
    ["{python}", "-c", "print('{queue}')"],
    ["/usr/bin/perl", "-e", "work('{queue}')"],
    ["/bin/busybox", "sh", "-c", "work {queue}"],
    ["/usr/sbin/runuser", "worker", "-c", "work {queue}"],
    ["/bin/su", "worker", "--command", "work {queue}"],
]


@pytest.mark.parametrize("command", SHELLS)
def test_a_value_never_becomes_a_part_of_a_script(command: list[str]) -> None:
    """In every kind of template: whoever may set a parameter could run anything."""
    for parse in (check_command, parse_arguments):
        with pytest.raises(ValueError, match=r"\{queue\} within a script"):
            parse(command)
    container = {"image": "a/b:1", "entrypoint": command[:2], "command": command[2:]}
    with pytest.raises(ValueError, match=r"within a script|takes no placeholder"):
        ContainerTemplate.model_validate(container)


@pytest.mark.parametrize(
    "command",
    [
        ["/bin/sh", "-c", 'work "$1"', "sh", "{queue}"],
        ["/bin/sh", "-c", "work {count:int} {gpu_count} {endpoint}"],
        ["/bin/sh", "run.sh", "-c", "fixed", "{queue}"],
        ["/srv/work", "-c", "{queue}"],
        ["{python}", "work.py", "--queue", "{queue}"],
    ],
)
def test_values_beside_a_script_and_values_of_gpuscale_are_fine(command: list[str]) -> None:
    check_command(command)


def test_the_environment_is_clean_but_for_what_the_template_says() -> None:
    template = CommandTemplate(command=("/bin/prog",), env={"A": "1", "HOME": "/w"}, pass_env=("SECRET",))
    own = {"PATH": "/bin", "HOME": "/root", "LD_PRELOAD": "x.so", "SECRET": "s", "OTHER": "o"}
    with pytest.raises(LaunchRefusedError, match="SECRET"):
        launch("worker", template, order(), PYTHON, {})
    without = launch("w", CommandTemplate(command=("/bin/prog",)), ReplicaOrder("r", "e", {}), PYTHON, own)
    assert without.env["CUDA_VISIBLE_DEVICES"] == "", "a replica without GPUs sees none"
    assert launch("worker", template, order(), PYTHON, own).env == {
        "PATH": "/bin",
        "HOME": "/w",
        "A": "1",
        "SECRET": "s",
        "CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b",
        "GPUSCALE_GPU_UUIDS": "GPU-a,GPU-b",
        "GPUSCALE_ENDPOINT": "endpoints/jobs",
        "GPUSCALE_REPLICA": "endpoints/jobs/replicas/r1",
        "GPUSCALE_FENCE": "7",
        "GPUSCALE_RESERVATION": "",
    }


@pytest.mark.parametrize(
    "table",
    [
        {"env": {"CUDA_VISIBLE_DEVICES": "0"}}, {"env": {"GPUSCALE_REPLICA": "x"}},
        {"pass_env": ["GPUSCALE_FENCE"]}, {"env": {"A=B": "x"}}, {"env": {"A": "x\0y"}}, {"pass_env": ["1A"]},
        {"ready": "soon"}, {"shell": True},
    ],
)  # fmt: skip
def test_a_template_may_not_set_what_the_adapter_sets(table: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        ProcessTemplate.model_validate({"command": ["/bin/prog"], **table})


def test_the_adapter_is_named_after_its_node_unless_it_is_told_otherwise() -> None:
    table = {"node": "host-1", "data_dir": "/data"}
    assert ProcessSettings.model_validate(table).adapter_id == "host-1"
    assert ProcessSettings.model_validate(table | {"adapter": "two"}).adapter_id == "two"
    with pytest.raises(ValidationError):
        ProcessSettings.model_validate(table | {"adapter": "Not An Id"})
    with pytest.raises(ValidationError):
        ProcessSettings.model_validate(table | {"templates": {"Bad Name": {"command": ["/bin/prog"]}}})
