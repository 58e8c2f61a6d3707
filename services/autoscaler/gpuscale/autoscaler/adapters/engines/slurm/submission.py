"""How a replica becomes a batch job: the arguments of `sbatch`, and the environment that the job gets. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpuscale.autoscaler.adapters.engines.slurm.jobs import job_name
from gpuscale.autoscaler.adapters.templates import LaunchRefusedError, ReplicaOrder, Template, launch

SCRIPT = Path(__file__).with_name("replica.sh")

_AWAY = ("Unable to contact slurm controller", "Socket timed out", "Zero Bytes", "standby mode")
_NEVER = (
    "Access denied",
    "CPU count specification invalid",
    "Invalid",
    "More processors requested than permitted",
    "Node count specification invalid",
    "Requested node configuration is not available",
    "Requested nodes not in this partition",
    "Requested time limit is invalid",
    "Unrecognized",
    "User's group not permitted",
    "invalid",
    "permission denied",
)


@dataclass(frozen=True, slots=True)
class JobTemplate:
    """How replicas of one template become jobs; what is empty is left to Slurm.

    Attributes:
        command: what runs, and with which variables.
        partition: where.
        account: on whose bill.
        qos: quality of service.
        constraint: what its nodes must have.
        gpu_type: kind of GPUs, such as a100.
        cpus: of a replica on each of its nodes; 0 for Slurm's default.
        memory: on each of its nodes, such as 64G.
        time_limit: in a form that sbatch(1) takes.
        nodes: how many a replica spans.
        output: file for what it prints, with the patterns of sbatch(1).
        notice: seconds before its time limit at which it is sent SIGTERM; 0 for never.
    """

    command: Template
    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    gpu_type: str = ""
    cpus: int = 0
    memory: str = ""
    time_limit: str = ""
    nodes: int = 1
    output: str = ""
    notice: int = 0


@dataclass(frozen=True, slots=True)
class Submission:
    """What sbatch is called with."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]


def submission(
    template: JobTemplate, order: ReplicaOrder, adapter: str, python: str, environment: Mapping[str, str]
) -> Submission:
    """How to submit the job of a replica.

    `singleton` lets only one job of a name run at a time: should an answer of Slurm be lost and the job be submitted
    again, the second one waits for the end of the first, and can be cancelled. A job that ended is not queued again by
    Slurm, since what takes its place is the autoscaler's to say.

    Raises:
        LaunchRefusedError: the order does not fit the template.
    """
    what = launch(template.command, order, python, environment)
    options = {
        "job-name": job_name(adapter, order.replica),
        "comment": order.replica,
        "dependency": "singleton",
        "export": "ALL",
        "nodes": str(template.nodes),
        "gres": _gpus(template, order.gpu_count),
        "partition": template.partition,
        "account": template.account,
        "qos": template.qos,
        "constraint": template.constraint,
        "cpus-per-task": str(template.cpus or ""),
        "mem": template.memory,
        "time": template.time_limit,
        "chdir": str(what.working_dir or ""),
        "output": template.output,
        "signal": f"B:TERM@{template.notice}" if template.notice else "",
    }
    # sbatch hands on its own environment. Slurm says which GPUs a job has; one that asks for none must see none.
    variables = {
        name: value
        for name, value in what.env.items()
        if name != "CUDA_VISIBLE_DEVICES" or not order.gpu_count
    }
    given = (f"--{name}={value}" for name, value in options.items() if value)
    return Submission(("--parsable", "--no-requeue", *given, str(SCRIPT), *what.argv), variables)


def is_away(said: str) -> bool:
    """Whether a command of Slurm failed since the controller does not answer."""
    return any(text in said for text in _AWAY)


def is_refusal(said: str) -> bool:
    """Whether sbatch was told that a job like this can never run, by the texts of slurm_strerror."""
    return any(text in said for text in _NEVER)


def _gpus(template: JobTemplate, count: int) -> str:
    """GPUs on each node, as --gres takes them."""
    each, left = divmod(count, template.nodes)
    if left:
        raise LaunchRefusedError(
            f"{count} GPUs cannot be shared by the {template.nodes} nodes of template {template.command.name}"
        )
    kind = f"gpu:{template.gpu_type}" if template.gpu_type else "gpu"
    return f"{kind}:{each}" if each else ""
