"""Command templates: how the adapter's own configuration starts a replica. Pure.

A command is a list of arguments, never a shell line. `{name}` in an argument is a placeholder: one of `BUILTIN`, or a parameter
of the endpoint. `{name:int}` accepts only a whole number. `{{` and `}}` are literal braces. A placeholder never reaches beyond
its argument, the program itself is fixed, and the environment has no placeholders: so API users choose values, and nothing else.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from gpuscale.autoscaler.adapters.engine import LaunchRefusedError, ReplicaOrder
from gpuscale.common.names import is_id

BUILTIN = frozenset({"python", "replica", "endpoint", "gpu_uuids", "gpu_count", "capabilities"})
INHERITED = ("PATH", "HOME", "LANG")
"""Variables of the adapter's own environment that every replica gets."""
PYTHON = "{python}"
MAX_VALUE_LENGTH = 1024

_OWN_VARIABLE = re.compile(
    r"GPUSCALE_(REPLICA|ENDPOINT|GPU_UUIDS|FENCE|RESERVATION|CAPABILITIES)|CUDA_VISIBLE_DEVICES"
)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PIECE = re.compile(r"\{\{|\}\}|\{(?P<name>[^{}:]*)(?::(?P<kind>[^{}]*))?\}|(?P<stray>[{}])|[^{}]+")
_INTERPRETER = re.compile(
    r"(.*/)?((a|ba|da|fi|k|mk|pdk|tc|c|z)?sh|busybox|su|runuser|script|python[0-9.]*|perl|ruby|node|php|lua|Rscript)"
)
_SCRIPT_FLAG = re.compile(r"-[A-Za-z]*[cer]|--(command|eval|print)")
"""Options of interpreters that precede a script: -c, -ec, -e, -r."""
_INTEGER = re.compile(r"-?[0-9]{1,18}")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Placeholder:
    """A part of an argument to fill in: the name of a value, and whether it must be a whole number."""

    name: str
    integer: bool = False


def template_named(templates: Mapping[str, T], name: str) -> T:
    """The template of that name. Raises LaunchRefusedError if there is none."""
    if name not in templates:
        raise LaunchRefusedError(f"this adapter has no template {name}")
    return templates[name]


def check_command(command: tuple[str, ...]) -> tuple[str, ...]:
    """Return a program and its arguments.

    ValueError if the program is neither absolute nor {python}, a brace is unmatched, or a value would run as a script.
    """
    if not command:
        raise ValueError("needs at least a program")
    program = command[0]
    if program != PYTHON and (not program.startswith("/") or "{" in program or "}" in program):
        raise ValueError("must begin with an absolute path or {python}")
    return check_arguments(command)


def check_arguments(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """Return arguments; ValueError like `parse_arguments`."""
    parse_arguments(arguments)
    return arguments


def parse_arguments(arguments: Iterable[str]) -> tuple[tuple[str | Placeholder, ...], ...]:
    """Arguments as texts and placeholders; ValueError for a NUL, an unmatched brace, or a value that would run as code."""
    listed = list(arguments)
    if any("\0" in argument for argument in listed):
        raise ValueError("must not hold NUL characters")
    parsed = tuple(parse_argument(argument) for argument in listed)
    # No placeholder in a script: whoever sets such a parameter would write part of the program.
    interpreted = False
    for place, argument in enumerate(listed):
        if not (interpreted and _SCRIPT_FLAG.fullmatch(argument)):
            interpreted = interpreted or argument == PYTHON or bool(_INTERPRETER.fullmatch(argument))
            continue
        script = next((at for at in range(place + 1, len(listed)) if not listed[at].startswith("-")), place)
        for part in parsed[script]:
            if isinstance(part, Placeholder) and not part.integer and part.name not in BUILTIN:
                raise ValueError(
                    f"has {{{part.name}}} within a script, where its value would run as code: give it as an argument after the"
                    f' script, such as ["/bin/sh", "-c", "run \\"$1\\"", "sh", "{{{part.name}}}"]'
                )
    return parsed


def check_after(fixed: Iterable[str], arguments: Iterable[str]) -> None:
    """Check arguments after words of a container's own, where braces are literal and a script may begin."""
    parse_arguments((*(word.replace("{", "{{").replace("}", "}}") for word in fixed), *arguments))


def parse_argument(argument: str) -> tuple[str | Placeholder, ...]:
    """An argument as texts and placeholders; ValueError for an unmatched brace or an invalid placeholder."""
    parts: list[str | Placeholder] = []
    for piece in _PIECE.finditer(argument):
        name, kind = piece["name"], piece["kind"]
        if piece["stray"] is not None:
            raise ValueError("has an unmatched brace; write {{ or }} for a literal brace")
        if name is None:
            parts.append(piece[0].replace("{{", "{").replace("}}", "}"))
        elif not is_id(name) or kind not in {None, "int"}:
            raise ValueError(f"has a placeholder {piece[0]} that is neither {{name}} nor {{name:int}}")
        else:
            parts.append(Placeholder(name, integer=kind == "int"))
    return tuple(parts)


def placeholders(arguments: Iterable[Iterable[str | Placeholder]]) -> set[str]:
    """The names of the values that fill these arguments."""
    return {part.name for parts in arguments for part in parts if isinstance(part, Placeholder)}


def check_environment(env: Mapping[str, str], pass_env: Iterable[str]) -> None:
    """ValueError if a template sets or passes on an invalid variable, or one that the adapter sets."""
    for name in (*env, *pass_env):
        if not _VARIABLE.fullmatch(name):
            raise ValueError(f"{name!r} is not a valid variable name")
        if _OWN_VARIABLE.fullmatch(name):
            raise ValueError(f"{name} is set by the adapter")
    if any("\0" in value for value in env.values()):
        raise ValueError("must not hold NUL characters")


Command = Annotated[tuple[str, ...], AfterValidator(check_command)]
Arguments = Annotated[tuple[str, ...], AfterValidator(check_arguments)]


class CommandTemplate(BaseModel):
    """The command in a template's table, if the adapter has the whole of it."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    command: Command
    """The program, an absolute path or {python}, and its arguments."""
    working_dir: Path | None = None
    """The working directory; the adapter's by default."""
    env: dict[str, str] = Field(default_factory=dict[str, str])
    """Variables to set. The environment is otherwise clean."""
    pass_env: tuple[str, ...] = ()
    """Variables to pass on from the adapter's own environment, such as one with a password."""

    @model_validator(mode="after")
    def _check_environment(self) -> Self:
        check_environment(self.env, self.pass_env)
        return self


def _check_port(port: str) -> str:
    parse_argument(port)
    if not (port.isdigit() and 0 < int(port) < 65_536) and not (port[:1] == "{" and port.endswith(":int}")):
        raise ValueError("must be a port, or a placeholder such as {free_port:int}")
    return port


def _check_path(path: str) -> str:
    if not path.startswith("/") or not path.isascii() or not path.isprintable() or set(path) & set(" {}#"):
        raise ValueError("must be a path such as /metrics")
    return path


class ServedMetrics(BaseModel):
    """A table NAME.metrics of a template: where replicas expose metrics, by http:// on their host."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    port: Annotated[str, AfterValidator(_check_port)]
    """The port, such as "8000", or a placeholder of the command, such as "{free_port:int}"."""
    path: Annotated[str, AfterValidator(_check_path)] = "/metrics"
    """The path."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What to start: arguments, the whole environment, and the working directory."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    working_dir: Path | None


def launch(
    name: str,
    template: CommandTemplate,
    order: ReplicaOrder,
    python: str,
    environment: Mapping[str, str],
    *,
    also: Iterable[str] = (),
) -> Launch:
    """The launch of a replica from a template; `also` lists more arguments that may use values. LaunchRefusedError."""
    return Launch(
        argv=fill_arguments(name, template.command, order, python, also=also),
        env={
            **{variable: environment[variable] for variable in INHERITED if variable in environment},
            **handed_on(name, template.pass_env, environment),
            **template.env,
            # Empty for a replica without GPUs, so that it sees none.
            "CUDA_VISIBLE_DEVICES": ",".join(order.gpu_uuids),
            **order.reserved_variables(),
        },
        working_dir=template.working_dir,
    )


def handed_on(name: str, pass_env: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that the template of that name passes on; LaunchRefusedError if the adapter lacks one."""
    for variable in pass_env:
        if variable not in environment:
            raise LaunchRefusedError(
                f"template {name} passes on {variable}, which is not in the adapter's environment"
            )
    return {variable: environment[variable] for variable in pass_env}


def fill_arguments(
    name: str, arguments: Iterable[str], order: ReplicaOrder, python: str, *, also: Iterable[str] = ()
) -> tuple[str, ...]:
    """The arguments of a replica from the template `name`; {python} is `python`. LaunchRefusedError."""
    parsed = [parse_argument(argument) for argument in arguments]
    used = placeholders([*parsed, *(parse_argument(argument) for argument in also)])
    for parameter, value in order.parameters.items():
        if parameter in BUILTIN:
            raise LaunchRefusedError(f"parameter {parameter} is set by the adapter")
        if parameter not in used:
            raise LaunchRefusedError(f"template {name} has no placeholder {{{parameter}}}")
        if not value.isprintable() or len(value) > MAX_VALUE_LENGTH:
            raise LaunchRefusedError(
                f"parameter {parameter} must be at most {MAX_VALUE_LENGTH} printable characters"
            )
    if missing := sorted(used - BUILTIN - order.parameters.keys()):
        raise LaunchRefusedError(f"template {name} needs the parameter {missing[0]}")
    values = {
        **order.parameters,
        "python": python,
        "replica": order.replica,
        "endpoint": order.endpoint,
        "gpu_uuids": ",".join(order.gpu_uuids),
        "gpu_count": str(order.gpu_count or len(order.gpu_uuids)),
        "capabilities": order.capability_text,
    }
    filled: list[str] = []
    for argument in parsed:
        text = ""
        for part in argument:
            if isinstance(part, str):
                text += part
                continue
            value = values[part.name]
            if part.integer and not _INTEGER.fullmatch(value):
                raise LaunchRefusedError(f"parameter {part.name} of template {name} must be a whole number")
            # At the start of an argument it would turn a value into an option of the program.
            if not text and value.startswith("-") and not part.integer:
                raise LaunchRefusedError(f"parameter {part.name} of template {name} must not begin with '-'")
            text += value
        filled.append(text)
    return tuple(filled)
