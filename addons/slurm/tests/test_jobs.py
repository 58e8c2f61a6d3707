"""Batch jobs of Slurm: whose they are, how far they have come, how they ended, and what is submitted."""

from pathlib import Path
from typing import Any

import pytest

from gpuscale.autoscaler.adapters.engine import LaunchRefusedError, ReplicaOrder, Sighting, WorkerLife
from gpuscale_slurm.engine import SlurmSettings
from gpuscale_slurm.jobs import (
    SCRIPT,
    JobTemplate,
    SlurmJob,
    Submission,
    is_away,
    is_refusal,
    job_name,
    parse_jobs,
    question,
    replica_of,
    sighting,
    submission,
)

ONE = "endpoints/e/replicas/one"
NAME = "gpuscale:a:e:one"
SECRET = "5e"


def template(*command: str, **fields: Any) -> JobTemplate:
    return JobTemplate(command=command or ("/bin/worker",), env={"K": "V"}, **fields)


def submitted(made: JobTemplate, asked: ReplicaOrder) -> Submission:
    return submission("worker", made, asked, "a", "python", {})


def order(gpus: int = 0, **parameters: str) -> ReplicaOrder:
    return ReplicaOrder(ONE, "endpoints/e", parameters, gpu_count=gpus)


def line(*fields: str) -> str:
    """What squeue says of a job."""
    return "".join(f"{field}|{SECRET}|" for field in fields) + "\n"


def seen(state: str, status: str = "0", reason: str = "None") -> Sighting:
    [job] = parse_jobs(line("7", state, status, "1:00", reason, NAME), SECRET)
    return sighting(job)


def test_a_job_is_known_by_its_name_alone() -> None:
    assert job_name("a", ONE) == NAME
    assert replica_of("a", NAME) == ONE


@pytest.mark.parametrize(
    "name",
    ["gpuscale:b:e:one", "gpuscale:a:e", "gpuscale:a:e:one:x", "other:a:e:one", "gpuscale:a:E!:one", ""],
)
def test_what_is_not_this_adapters_is_nobodys_replica(name: str) -> None:
    assert replica_of("a", name) is None


def test_the_jobs_of_one_user_are_asked_for_also_those_that_ended() -> None:
    asked = question(1000, SECRET)
    assert "--user=1000" in asked
    assert "--states=all" in asked


@pytest.mark.parametrize(
    "name",
    [
        "a|b c|",
        "a\nb",
        "\n",
        "\r\x0b\x0c\x1c\x85\u2028",
        f"x\n8|RUNNING|0|5:00|None|{NAME}|",
        line("8", "RUNNING"),
    ],
)
def test_the_name_of_a_job_of_somebody_else_may_hold_anything(name: str) -> None:
    """It takes no sight from the other jobs, and no other job can be made up in it."""
    name = name.replace(SECRET, "guess")
    said = line("6", "PENDING", "0", "0:00", "a|b\nc", name) + line("7", "RUNNING", "0", "0:02", "None", NAME)
    assert parse_jobs(said, SECRET) == [
        SlurmJob(6, name, "PENDING", young=True, reason="a|b\nc"),
        SlurmJob(7, NAME, "RUNNING", young=True, reason="None"),
    ]
    assert parse_jobs("", SECRET) == []


@pytest.mark.parametrize(
    "said",
    [
        "slurm is being upgraded",
        "\n",
        line("x", "RUNNING", "0", "0:00", "None", "n"),
        line("1", "RUNNING", "0"),
        line("1", "RUNNING", "0", "0:00", "None", NAME)[:-1],
    ],
)
def test_an_answer_that_is_none_is_no_empty_list(said: str) -> None:
    with pytest.raises(ValueError, match="squeue says"):
        parse_jobs(said, SECRET)


@pytest.mark.parametrize(
    ("state", "reason", "expected"),
    [
        ("PENDING", "Resources", Sighting(WorkerLife.STARTING, reason="its job 7 is pending: Resources")),
        ("CONFIGURING", "None", Sighting(WorkerLife.STARTING, reason="its job 7 is configuring")),
        ("RUNNING", "None", Sighting(WorkerLife.READY)),
        ("SUSPENDED", "None", Sighting(WorkerLife.STARTING, reason="its job 7 is suspended")),
        ("COMPLETING", "None", Sighting(WorkerLife.STARTING, reason="its job 7 is completing")),
        (
            "A_STATE_OF_TOMORROW",
            "None",
            Sighting(WorkerLife.STARTING, reason="its job 7 is a_state_of_tomorrow"),
        ),
    ],
)
def test_what_lives(state: str, reason: str, expected: Sighting) -> None:
    """A state that is not known to be an end is none: what may run is never taken for gone."""
    assert seen(state, reason=reason) == expected


@pytest.mark.parametrize(
    ("state", "status", "reason", "code", "why"),
    [
        ("COMPLETED", "0", "None", 0, "it ended by itself"),
        ("FAILED", "768", "NonZeroExitCode", 3, "exit code 3"),
        ("FAILED", "3:0", "NonZeroExitCode", 3, "exit code 3"),
        ("FAILED", "9", "JobLaunchFailure", -9, "ended by signal 9"),
        ("FAILED", "0:9", "None", -9, "ended by signal 9"),
        ("FAILED", "1", "BadConstraints", None, "its job failed: BadConstraints"),
        ("CANCELLED", "0", "None", None, "its job was cancelled"),
        ("CANCELLED", "15", "None", -15, "its job was cancelled"),
        ("TIMEOUT", "0", "TimeLimit", None, "the time limit of its job is over"),
        ("PREEMPTED", "0", "None", None, "preempted by another job"),
        ("NODE_FAIL", "0", "NodeDown", None, "its node failed"),
        ("OUT_OF_MEMORY", "125", "OutOfMemory", None, "out of memory"),
        ("BOOT_FAIL", "?", "None", None, "its node could not be started"),
    ],
)
def test_every_end_has_its_words_and_its_exit_code(
    state: str, status: str, reason: str, code: int | None, why: str
) -> None:
    assert seen(state, status, reason) == Sighting(WorkerLife.ENDED, code, why)


def test_what_is_submitted_for_gpus() -> None:
    """Slurm says which GPUs a job has; a second job of the name waits for the end of the first."""
    found = submission(
        "worker",
        template(
            "{python}", "-m", "w", "--queue={queue}", partition="gpu", cpus=8, memory="64G", gpu_type="a100"
        ),
        order(2, queue="$(id); jobs"),
        "a",
        "/usr/bin/python3",
        {"PATH": "/bin", "SECRET": "x"},
    )
    assert found.arguments == (
        "--parsable",
        "--no-requeue",
        f"--job-name={NAME}",
        f"--comment={ONE}",
        "--dependency=singleton",
        "--export=ALL",
        "--nodes=1",
        "--gres=gpu:a100:2",
        "--partition=gpu",
        "--cpus-per-task=8",
        "--mem=64G",
        str(SCRIPT),
        *("/usr/bin/python3", "-m", "w", "--queue=$(id); jobs"),
    )
    assert found.environment == {
        "PATH": "/bin",
        "K": "V",
        "GPUSCALE_ENDPOINT": "endpoints/e",
        "GPUSCALE_FENCE": "0",
        "GPUSCALE_GPU_UUIDS": "",
        "GPUSCALE_REPLICA": ONE,
        "GPUSCALE_RESERVATION": "",
    }


def test_one_that_asks_for_no_gpus_sees_none() -> None:
    found = submitted(template(), order())
    assert not any(argument.startswith("--gres") for argument in found.arguments)
    assert found.environment["CUDA_VISIBLE_DEVICES"] == ""


def test_the_rest_of_a_template() -> None:
    fields = {
        "account": "lab",
        "qos": "high",
        "constraint": "ib&nvme",
        "time_limit": "8:00:00",
        "nodes": 2,
        "output": "/logs/%j",
        "notice_seconds": 60,
    }
    found = submitted(template(**fields), order(4)).arguments
    assert {
        "--account=lab",
        "--qos=high",
        "--constraint=ib&nvme",
        "--time=8:00:00",
        "--nodes=2",
        "--gres=gpu:2",
        "--output=/logs/%j",
        "--signal=B:TERM@60",
    } <= set(found)


def test_what_does_not_fit_its_template_is_refused() -> None:
    with pytest.raises(LaunchRefusedError, match="cannot be shared"):
        submitted(template(nodes=2), order(3))
    with pytest.raises(LaunchRefusedError, match="placeholder"):
        submitted(template(), order(queue="q"))


def test_no_shell_reads_what_a_replica_is_given() -> None:
    """The script is fixed; everything else comes to it as arguments."""
    lines = Path(SCRIPT).read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if not line.startswith("#")] == ['exec "$@"']


@pytest.mark.parametrize(
    ("said", "away", "never"),
    [
        ("sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)", 1, 0),
        ("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", 1, 0),
        ("sbatch: error: Batch job submission failed: Invalid partition name specified", 0, 1),
        ("sbatch: error: Batch job submission failed: Requested node configuration is not available", 0, 1),
        ("sbatch: error: Batch job submission failed: Access/permission denied", 0, 1),
        ("sbatch: error: Batch job submission failed: Requested partition configuration not available now", 0, 0),
        ("sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit", 0, 0),
    ],
)  # fmt: skip
def test_away_never_and_not_now_are_told_apart(said: str, away: int, never: int) -> None:
    assert (is_away(said), is_refusal(said)) == (bool(away), bool(never))


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"command": ["worker"]}, "absolute path"),
        ({"memory": "64 GB"}, "pattern"),
        ({"time_limit": "a day"}, "pattern"),
        ({"partition": "gpu --exclusive"}, "pattern"),
        ({"output": "a\nb"}, "printable"),
        ({"env": {"GPUSCALE_REPLICA": "x"}}, "set by the adapter"),
        ({"unknown": 1}, "Extra"),
    ],
)
def test_a_table_of_no_use_is_refused(fields: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        JobTemplate.model_validate({"command": ["/bin/worker"], **fields})


def test_a_template_takes_from_the_adapter_what_it_does_not_say() -> None:
    tables = {"own": {"command": ["/w"], "partition": "long", "qos": ""}, "other": {"command": ["/w"]}}
    given = {"data_dir": "d", "partition": "gpu", "qos": "high", "slurm_templates": tables}
    templates = SlurmSettings.model_validate(given).templates()
    assert (templates["own"].partition, templates["own"].qos) == ("long", "")
    assert (templates["other"].partition, templates["other"].qos) == ("gpu", "high")
    with pytest.raises(ValueError, match="must be an id"):
        SlurmSettings.model_validate({"data_dir": "d", "slurm_templates": {"A B": tables["own"]}})
