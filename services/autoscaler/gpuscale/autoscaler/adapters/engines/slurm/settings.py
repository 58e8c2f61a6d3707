"""Settings of `gpuscale-slurm-adapter`; `gpuscale.common.config.settings` says where they come from."""

from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

from gpuscale.autoscaler.adapters.engines.slurm.jobs import JobTemplate
from gpuscale.autoscaler.adapters.settings import EngineAdapterSettings
from gpuscale.autoscaler.adapters.templates import Template, check_environment, parse_command
from gpuscale.common.names import is_id

Word = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.,-]*$", max_length=255)]
Memory = Annotated[str, StringConstraints(pattern=r"^([0-9]{1,12}[KMGT]?)?$")]
TimeLimit = Annotated[
    str, StringConstraints(pattern=r"^([0-9]+(-[0-9]+)?(:[0-9]{1,2}){0,2})?$", max_length=32)
]


class SlurmTemplateSettings(BaseModel):
    """One table [slurm_templates.NAME]: how replicas of endpoints that name it become jobs."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    command: tuple[str, ...]
    """The program, an absolute path on the nodes or {python}, and its arguments."""
    working_dir: Path | None = None
    """Where it is started; by default where the adapter was."""
    env: dict[str, str] = Field(default_factory=dict[str, str])
    """Variables to set. The environment is otherwise clean, but for Slurm's own."""
    pass_env: tuple[str, ...] = ()
    """Variables to hand on from the adapter's own environment, such as one with a password."""
    partition: Word | None = None
    """Where it runs; by default that of the adapter."""
    account: Word | None = None
    """On whose bill; by default that of the adapter."""
    qos: Word | None = None
    """Quality of service; by default that of the adapter."""
    constraint: str = Field("", max_length=1024)
    """What its nodes must have."""
    gpu_type: Word = ""
    """Kind of GPUs, such as a100; any kind when empty."""
    cpus: int = Field(0, ge=0, le=10_000)
    """Of a replica on each of its nodes; 0 for Slurm's default."""
    memory: Memory = ""
    """On each of its nodes, such as 64G; Slurm's default when empty."""
    time_limit: TimeLimit = ""
    """In a form that sbatch takes, such as 8:00:00; the partition's when empty."""
    nodes: int = Field(1, ge=1, le=10_000)
    """How many a replica spans; its command runs on the first, and its GPUs are shared out evenly."""
    output: str = Field("", max_length=4096)
    """File for what it prints, with the patterns of sbatch; slurm-%j.out in its working directory when empty."""
    notice_seconds: int = Field(0, ge=0, le=65_535)
    """Seconds before its time limit at which it is sent SIGTERM; 0 for never."""

    @field_validator("command")
    @classmethod
    def _check_command(cls, command: tuple[str, ...]) -> tuple[str, ...]:
        parse_command(command)
        return command

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_environment(self.env, self.pass_env)
        if not (self.constraint + self.output).isprintable():
            raise ValueError("constraint and output must be printable")
        return self


class SlurmAdapterSettings(EngineAdapterSettings):
    """What the Slurm adapter is told before it starts; the upstream is the autoscaler."""

    section: ClassVar[str] = "slurm_adapter"

    commands_dir: Path | None = Field(
        None, description="directory of sbatch, squeue and scancel; PATH if none"
    )
    slurm_conf: Path | None = Field(None, description="slurm.conf of the cluster; where Slurm looks if none")
    poll_seconds: float = Field(2.0, ge=0.2, le=5, description="seconds between two looks at the queue")
    python: str = Field(
        "", description="interpreter on the nodes that {python} stands for; the adapter's own if none"
    )
    partition: Word = Field(
        "", description="partition of templates that name none; Slurm's default when empty"
    )
    account: Word = Field(
        "", description="account of templates that name none; the user's default when empty"
    )
    qos: Word = Field(
        "", description="quality of service of templates that name none; the default when empty"
    )
    slurm_templates: dict[str, SlurmTemplateSettings] = Field(
        default_factory=dict[str, SlurmTemplateSettings], description="templates of jobs by name"
    )

    @model_validator(mode="after")
    def _check_templates(self) -> Self:
        for name in self.slurm_templates:
            if not is_id(name):
                raise ValueError(f"slurm_templates.{name}: the name of a template must be an id")
        return self

    def templates(self) -> dict[str, JobTemplate]:
        """How replicas become jobs, by name of the template."""
        return {name: self._template(name, table) for name, table in self.slurm_templates.items()}

    def _template(self, name: str, table: SlurmTemplateSettings) -> JobTemplate:
        command = Template(name, parse_command(table.command), table.working_dir, table.env, table.pass_env)
        return JobTemplate(
            command=command,
            partition=self.partition if table.partition is None else table.partition,
            account=self.account if table.account is None else table.account,
            qos=self.qos if table.qos is None else table.qos,
            constraint=table.constraint,
            gpu_type=table.gpu_type,
            cpus=table.cpus,
            memory=table.memory,
            time_limit=table.time_limit,
            nodes=table.nodes,
            output=table.output,
            notice=table.notice_seconds,
        )
