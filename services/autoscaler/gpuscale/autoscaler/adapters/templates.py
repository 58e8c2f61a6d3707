"""Command templates: how the adapter's own configuration says that a replica is started. Pure.

A command is a list of arguments, never a line for a shell. `{name}` in an argument is a placeholder: one of `BUILTIN`, or
a parameter that the endpoint gives. `{name:int}` takes a whole number only. `{{` and `}}` are the braces themselves. A
placeholder never reaches beyond its argument, the program itself is fixed, and the environment takes no placeholders: so
whoever may use the API chooses values, and nothing else.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpuscale.autoscaler.adapters.engines.process.probes import Probe, ProbeKind, Timing
from gpuscale.autoscaler.domain.model import ANY
from gpuscale.common.names import is_id

BUILTIN = frozenset({"python", "replica", "endpoint", "gpu_uuids", "gpu_count", "capabilities"})
INHERITED = ("PATH", "HOME", "LANG")
"""What every replica gets of the adapter's own environment."""
PYTHON = "{python}"
MAX_VALUE_LENGTH = 1024

_OWN_VARIABLE = re.compile(
    r"GPUSCALE_(REPLICA|ENDPOINT|GPU_UUIDS|FENCE|RESERVATION|CAPABILITIES)|CUDA_VISIBLE_DEVICES"
)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PIECE = re.compile(r"\{\{|\}\}|\{(?P<name>[^{}:]*)(?::(?P<kind>[^{}]*))?\}|(?P<stray>[{}])|[^{}]+")
_INTERPRETER = re.compile(
    r"(.*/)?((a|ba|da|fi|k|mk|pdk|tc|c|z)?sh|busybox|python[0-9.]*|perl|ruby|node|php|lua)"
)
_SCRIPT_FLAG = re.compile(r"-[A-Za-z]*[cer]|--(command|eval|print)")
"""What the interpreters' scripts come after: -c, -ec, -e, -r."""
_INTEGER = re.compile(r"-?[0-9]{1,18}")


class LaunchRefusedError(Exception):
    """A replica cannot be started as asked; the text says why, for a person."""


@dataclass(frozen=True, slots=True)
class Placeholder:
    """A part of an argument that is filled in: the name of a value, and whether it must be a whole number."""

    name: str
    integer: bool = False


@dataclass(frozen=True, slots=True)
class ProbeTemplate:
    """A health probe whose placeholders are not filled in yet: arguments of a program, or one address."""

    kind: ProbeKind
    target: tuple[tuple[str | Placeholder, ...], ...]
    timing: Timing


@dataclass(frozen=True, slots=True)
class Template:
    """A command template, checked.

    Attributes:
        name: what endpoints know it by.
        command: the arguments, each as texts and placeholders in a row.
        working_dir: where it is started; None for where the adapter runs.
        env: variables set for it.
        pass_env: variables handed on from the adapter's own environment, which must have them.
        probe: how it is asked whether it is well; None where it counts as ready once it lives.
    """

    name: str
    command: tuple[tuple[str | Placeholder, ...], ...]
    working_dir: Path | None = None
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    pass_env: tuple[str, ...] = ()
    probe: ProbeTemplate | None = None


@dataclass(frozen=True, slots=True)
class ReplicaOrder:
    """What the autoscaler says of a replica that is to run.

    Attributes:
        replica: endpoints/{endpoint}/replicas/{replica}.
        endpoint: endpoints/{endpoint}.
        parameters: values for the template's placeholders.
        gpu_uuids: its GPUs, where they are reserved.
        gpu_count: how many it needs.
        fence: of the reservation that holds them; 0 where it needs none.
        reservation: its name; empty where it needs none.
        lease_token: what came with the grant.
        capabilities: what its workers are to have, where its endpoint has capability sets.
    """

    replica: str
    endpoint: str
    parameters: Mapping[str, str]
    gpu_uuids: tuple[str, ...] = ()
    gpu_count: int = 0
    fence: int = 0
    reservation: str = ""
    lease_token: str = field(default="", repr=False)
    capabilities: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def capability_text(self) -> str:
        """As workers of OpenGRIS Scaler take them: gpu=2,high_memory."""
        return ",".join(
            name if amount == ANY else f"{name}={amount}"
            for name, amount in sorted(self.capabilities.items())
        )


@dataclass(frozen=True, slots=True)
class Launch:
    """What is to be started: arguments, the whole environment, the working directory, the GPUs, and how it is asked."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    working_dir: Path | None
    gpu_uuids: tuple[str, ...] = ()
    fence: int = 0
    reservation: str = ""
    lease_token: str = field(default="", repr=False)
    probe: Probe | None = None


def parse_address(kind: ProbeKind, address: str) -> tuple[str | Placeholder, ...]:
    """The address that a probe asks, split into texts and placeholders.

    Raises:
        ValueError: it is neither HOST:PORT nor an http:// URL, whichever it must be.
    """
    if kind is ProbeKind.HTTP and not address.startswith("http://"):
        raise ValueError("must begin with http://")
    if kind is ProbeKind.TCP and not address.rpartition(":")[0]:
        raise ValueError("must be HOST:PORT")
    if not address.isprintable() or " " in address:
        raise ValueError("must hold printable characters and no space")
    return _parse(address)


def parse_command(command: Iterable[str]) -> tuple[tuple[str | Placeholder, ...], ...]:
    """The arguments of a command, split into texts and placeholders.

    Raises:
        ValueError: no program, a program that is neither absolute nor {python}, a brace that stands alone, or a value that
            would be run as a script.
    """
    arguments = list(command)
    if not arguments:
        raise ValueError("needs at least a program")
    program = arguments[0]
    if program != PYTHON and (not program.startswith("/") or "{" in program or "}" in program):
        raise ValueError("must begin with an absolute path or {python}")
    return parse_arguments(arguments)


def parse_arguments(arguments: Iterable[str]) -> tuple[tuple[str | Placeholder, ...], ...]:
    """Arguments of a program that stands elsewhere, split into texts and placeholders; none is fine.

    Raises:
        ValueError: a NUL character, a brace that stands alone, or a value that would be run as a script.
    """
    listed = list(arguments)
    if any("\0" in argument for argument in listed):
        raise ValueError("must not hold NUL characters")
    parsed = tuple(_parse(argument) for argument in listed)
    _check_scripts(listed, parsed)
    return parsed


def check_environment(env: Mapping[str, str], pass_env: Iterable[str]) -> None:
    """Check the variables that a template sets and hands on.

    Raises:
        ValueError: a name that is none, one that the adapter sets itself, or a value with a NUL character.
    """
    for name in (*env, *pass_env):
        if not _VARIABLE.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a variable")
        if _OWN_VARIABLE.fullmatch(name):
            raise ValueError(f"{name} is set by the adapter")
    if any("\0" in value for value in env.values()):
        raise ValueError("must not hold NUL characters")


def launch(template: Template, order: ReplicaOrder, python: str, environment: Mapping[str, str]) -> Launch:
    """What to start for a replica.

    Args:
        template: how.
        order: which replica, with which values.
        python: path of the interpreter that {python} stands for.
        environment: the adapter's own, of which `INHERITED` and the template's `pass_env` are handed on.

    Raises:
        LaunchRefusedError: a value is missing, is of no use, or is not what its placeholder takes.
    """
    asked = template.probe.target if template.probe else ()
    values = _values(template.name, (*template.command, *asked), order, python)
    return Launch(
        argv=tuple(_fill(argument, values, template.name) for argument in template.command),
        env=_environment(template, order, environment),
        working_dir=template.working_dir,
        gpu_uuids=order.gpu_uuids,
        fence=order.fence,
        reservation=order.reservation,
        lease_token=order.lease_token,
        probe=_probe(template, values),
    )


def fill_arguments(
    template: str, arguments: Iterable[tuple[str | Placeholder, ...]], order: ReplicaOrder, python: str
) -> tuple[str, ...]:
    """The arguments of a replica that an engine starts: those of a template of that name, filled in.

    Args:
        template: its name, for whoever reads why it was refused.
        arguments: all that may hold placeholders.
        order: which replica, with which values.
        python: the interpreter that {python} stands for, where the replica runs.

    Raises:
        LaunchRefusedError: a value is missing, is of no use, or is not what its placeholder takes.
    """
    listed = tuple(arguments)
    values = _values(template, listed, order, python)
    return tuple(_fill(argument, values, template) for argument in listed)


def probe_environment(replica: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a program that a probe runs: nothing of the template's, which may hold passwords."""
    return {
        **{name: environment[name] for name in INHERITED if name in environment},
        "GPUSCALE_REPLICA": replica,
    }


def _parse(argument: str) -> tuple[str | Placeholder, ...]:
    parts: list[str | Placeholder] = []
    for piece in _PIECE.finditer(argument):
        name, kind = piece["name"], piece["kind"]
        if piece["stray"] is not None:
            raise ValueError("has a brace that stands alone; write {{ or }} for the brace itself")
        if name is None:
            parts.append(piece[0].replace("{{", "{").replace("}}", "}"))
        elif not is_id(name) or kind not in {None, "int"}:
            raise ValueError(f"has a placeholder {piece[0]} that is neither {{name}} nor {{name:int}}")
        else:
            parts.append(Placeholder(name, integer=kind == "int"))
    return tuple(parts)


def _check_scripts(listed: list[str], parsed: tuple[tuple[str | Placeholder, ...], ...]) -> None:
    """Refuse a placeholder within a script: whoever may set a parameter would write a part of the program."""
    interpreted = False
    for place, argument in enumerate(listed):
        if not (interpreted and _SCRIPT_FLAG.fullmatch(argument)):
            interpreted = interpreted or argument == PYTHON or bool(_INTERPRETER.fullmatch(argument))
            continue
        script = next((at for at in range(place + 1, len(listed)) if not listed[at].startswith("-")), place)
        for part in parsed[script]:
            if isinstance(part, Placeholder) and not part.integer and part.name not in BUILTIN:
                raise ValueError(
                    f"has {{{part.name}}} within a script, where its value would be run: give it as an argument after the"
                    f' script, such as ["/bin/sh", "-c", "run \\"$1\\"", "sh", "{{{part.name}}}"]'
                )


def _values(
    template: str, arguments: Iterable[tuple[str | Placeholder, ...]], order: ReplicaOrder, python: str
) -> dict[str, str]:
    used = {part.name for argument in arguments for part in argument if isinstance(part, Placeholder)}
    for name, value in order.parameters.items():
        if name in BUILTIN:
            raise LaunchRefusedError(f"parameter {name} is set by the adapter")
        if name not in used:
            raise LaunchRefusedError(f"template {template} has no placeholder {{{name}}}")
        if not value.isprintable() or len(value) > MAX_VALUE_LENGTH:
            raise LaunchRefusedError(
                f"parameter {name} must be at most {MAX_VALUE_LENGTH} printable characters"
            )
    if missing := sorted(used - BUILTIN - order.parameters.keys()):
        raise LaunchRefusedError(f"template {template} needs the parameter {missing[0]}")
    return {
        **order.parameters,
        "python": python,
        "replica": order.replica,
        "endpoint": order.endpoint,
        "gpu_uuids": ",".join(order.gpu_uuids),
        "gpu_count": str(order.gpu_count or len(order.gpu_uuids)),
        "capabilities": order.capability_text,
    }


def _fill(argument: tuple[str | Placeholder, ...], values: Mapping[str, str], template: str) -> str:
    filled = ""
    for part in argument:
        if isinstance(part, str):
            filled += part
            continue
        value = values[part.name]
        if part.integer and not _INTEGER.fullmatch(value):
            raise LaunchRefusedError(f"parameter {part.name} of template {template} must be a whole number")
        # At the head of an argument it would turn a value into an option of the program.
        if not filled and value.startswith("-") and not part.integer:
            raise LaunchRefusedError(f"parameter {part.name} of template {template} must not begin with '-'")
        filled += value
    return filled


def _probe(template: Template, values: Mapping[str, str]) -> Probe | None:
    if template.probe is None:
        return None
    target = tuple(_fill(part, values, template.name) for part in template.probe.target)
    return Probe(template.probe.kind, target, template.probe.timing)


def _environment(template: Template, order: ReplicaOrder, environment: Mapping[str, str]) -> dict[str, str]:
    for name in template.pass_env:
        if name not in environment:
            raise LaunchRefusedError(
                f"template {template.name} hands on {name}, which the adapter's environment does not have"
            )
    gpu_uuids = ",".join(order.gpu_uuids)
    able = {"GPUSCALE_CAPABILITIES": order.capability_text} if order.capabilities else {}
    return {
        **{name: environment[name] for name in (*INHERITED, *template.pass_env) if name in environment},
        **template.env,
        # Empty for a replica without GPUs, so that it sees none.
        "CUDA_VISIBLE_DEVICES": gpu_uuids,
        "GPUSCALE_ENDPOINT": order.endpoint,
        "GPUSCALE_FENCE": str(order.fence),
        "GPUSCALE_GPU_UUIDS": gpu_uuids,
        "GPUSCALE_REPLICA": order.replica,
        "GPUSCALE_RESERVATION": order.reservation,
        **able,
    }
