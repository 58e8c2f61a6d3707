"""Read settings from flags, environment and file; for the rules see `gpuscale.common.config.settings`."""

import argparse
import os
import re
import stat
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Any, ClassVar, Literal, NoReturn, TypeGuard, TypeVar, Union, cast, get_args, get_origin

from pydantic import BaseModel, ConfigDict, SecretBytes, SecretStr, ValidationError

from gpuscale.common.errors import InvalidArgumentError
from gpuscale.common.secrets import SecretUrl

PREFIX = "GPUSCALE_"
CONFIG_VARIABLE = "GPUSCALE_CONFIG"
# One file may serve several programs, so each knows the tables of all and rejects a misspelt one.
TABLES = frozenset(
    {
        "adapter",
        "agent",
        "allocator",
        "autoscaler",
        "brokers",
        "container_adapter",
        "container_templates",
        "dashboard",
        "ecs_adapter",
        "ecs_templates",
        "fleet",
        "gateway",
        "kubernetes_adapter",
        "kubernetes_templates",
        "prometheus",
        "ray_adapter",
        "ray_templates",
        "slurm_adapter",
        "slurm_templates",
        "templates",
        "up",
        "workers",
    }
)

_MISSPELT = 0.9
"""difflib ratio from which a variable counts as misspelt."""
_URL_WITH_PASSWORD = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]*:[^/\s]*@", re.IGNORECASE)
_NOTHING: Mapping[str, object] = MappingProxyType({})
_Kind = Literal["switch", "list", "table", "secret", "value"]
_KIND_OF: tuple[tuple[tuple[type, ...], _Kind], ...] = (
    ((bool,), "switch"),
    ((SecretStr, SecretBytes, SecretUrl), "secret"),
    ((Mapping, BaseModel), "table"),
    ((list, tuple, set, frozenset), "list"),
)
_FLAG_KINDS = frozenset({"switch", "list", "value"})


class Settings(BaseModel):
    """Settings of a program. Subclasses set `section` and describe their fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    section: ClassVar[str]


S = TypeVar("S", bound=Settings)


def load(settings_type: type[S], argv: Sequence[str] | None, *, program: str, description: str) -> S:
    """The settings of a program from its flags (None: those of the process), environment and file.

    Exits with 0 after `--help` or `--version`, and with 2 and one line on stderr if anything is unknown or invalid.
    """
    parser = _Parser(
        prog=program, description=description, allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    parser.add_argument("--version", action="version", version=f"{program} {version('gpuscale')}")
    parser.add_argument("--config", metavar="FILE", help=f"TOML file [{CONFIG_VARIABLE}]")
    for name, kind in _kinds(settings_type).items():
        field = settings_type.model_fields[name]
        variable = f"{PREFIX}{settings_type.section}_{name}".upper()
        value = None if field.is_required() else field.get_default(call_default_factory=True)
        default = "" if value in (None, "", []) else f" (default: {value})"
        text = f"{field.description or ''}{default} [{variable}]".replace("%", "%%").strip()
        if kind == "switch":
            parser.add_argument(_flag(name), action=argparse.BooleanOptionalAction, help=text)
        elif kind == "list":
            parser.add_argument(_flag(name), action="append", metavar="ITEM", help=f"{text}; may be repeated")
        elif kind == "value":
            parser.add_argument(_flag(name), metavar=name.rpartition("_")[2].upper(), help=text)
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        flags = (_flag(name) for name, kind in _kinds(settings_type).items() if kind in _FLAG_KINDS)
        parser.error(_unknown("flag", unknown[0].partition("=")[0], ("--config", "--help", *flags)))
    flags_given: dict[str, object] = vars(known)
    config = flags_given.pop("config", None) or os.environ.get(CONFIG_VARIABLE)
    try:
        table = read_config(Path(str(config)), settings_type) if config else _NOTHING
        return load_table(settings_type, table, flags_given)
    except InvalidArgumentError as error:
        parser.error(error.message)


def load_table(
    settings_type: type[S],
    config: Mapping[str, object],
    overrides: Mapping[str, object] = _NOTHING,
    environ: Mapping[str, str] | None = None,
) -> S:
    """The settings from `overrides` by field, then environment, then the tables of a file, then defaults.

    Raises InvalidArgumentError: a variable or key is unknown, or a value is invalid; the error names it.
    """
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    for origin, field, value in (
        *_from_file(settings_type, config),
        *_from_environment(settings_type, os.environ if environ is None else environ),
        *((_flag(field), field, value) for field, value in overrides.items()),
    ):
        values[field] = value
        origins[field] = origin
    try:
        return settings_type.model_validate(values)
    except ValidationError as error:
        problems: list[str] = []  # reported in one line, without values
        for problem in error.errors(include_url=False, include_context=False, include_input=False):
            field, *inner = (str(part) for part in problem["loc"] or (settings_type.section,))
            where = ".".join((origins.get(field, field), *inner))
            message = "unknown key" if problem["type"] == "extra_forbidden" else problem["msg"]
            problems.append(f"{where}: {message.removeprefix('Value error, ')}")
        raise InvalidArgumentError("; ".join(problems)) from None


def refuse_unused(
    settings_type: type[Settings], config: Mapping[str, object], unused: Mapping[str, str]
) -> None:
    """Reject settings in the environment or file that nothing reads; `unused` says by field what to do instead.

    Raises InvalidArgumentError: such a field is set, or a variable or key is unknown; the error names it.
    """
    for origin, field, _ in (
        *_from_file(settings_type, config),
        *_from_environment(settings_type, os.environ),
    ):
        if field in unused:
            raise InvalidArgumentError(f"{origin} is not used here: {unused[field]}")


def secret_variables(*settings: Settings) -> set[str]:
    """Environment variables with secrets: of secret fields, named in tables (`pass_env`), or URLs with a password."""
    names = {
        f"{PREFIX}{part.section}_{field}".upper()
        for part in settings
        for field, kind in _kinds(type(part)).items()
        if kind == "secret"
    }
    for part in settings:
        names.update(_named_variables(part.model_dump()))
    return names | {name for name, text in os.environ.items() if _URL_WITH_PASSWORD.match(text)}


def _named_variables(value: object) -> Iterator[str]:
    """Values of keys that name variables: `pass_env = ["NAME"]`."""
    if not is_table(value):
        return
    for key, item in value.items():
        if key == "pass_env":
            yield from _texts(item)
        else:
            yield from _named_variables(item)


def read_config(path: Path, settings_type: type[Settings] | None = None) -> dict[str, object]:
    """The tables of a TOML file; `settings_type` may add tables, for programs of other packages.

    Raises InvalidArgumentError: the file cannot be read, has an unknown table, or has a password and is world-readable.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            config: dict[str, object] = tomllib.load(file)
    except OSError as error:
        raise InvalidArgumentError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"{path} is not TOML: {error}") from error
    own = {} if settings_type is None else {settings_type.section: "table", **_kinds(settings_type)}
    known = TABLES | {name for name, kind in own.items() if kind == "table"}
    for name in config:
        if name not in known:
            raise InvalidArgumentError(f"{path}: {_unknown('table', name, known)}")
    if mode & stat.S_IROTH and any(_URL_WITH_PASSWORD.match(text) for text in _texts(config)):
        raise InvalidArgumentError(f"{path} holds a password and every user may read it: chmod o-r it")
    return config


def _from_file(
    settings_type: type[Settings], config: Mapping[str, object]
) -> Iterator[tuple[str, str, object]]:
    """Origin, field and value of each key for these settings."""
    section = settings_type.section
    table = config.get(section, {})
    if not is_table(table):
        raise InvalidArgumentError(f"{section} must be a table")
    kinds = _kinds(settings_type)
    keys = [name for name, kind in kinds.items() if kind != "table"]
    for name, value in table.items():
        if name not in keys:
            raise InvalidArgumentError(_unknown("key", name, keys, f" in [{section}]"))
        yield f"{name} in [{section}]", name, value
    for name, kind in kinds.items():
        if kind == "table" and name in config:
            yield name, name, config[name]


def _from_environment(
    settings_type: type[Settings], environ: Mapping[str, str]
) -> Iterator[tuple[str, str, object]]:
    prefix = f"{PREFIX}{settings_type.section.upper()}_"
    kinds = {f"{prefix}{name.upper()}": (name, kind) for name, kind in _kinds(settings_type).items()}
    known = {variable: found for variable, found in kinds.items() if found[1] != "table"}
    for variable, text in environ.items():
        if variable in known:
            name, kind = known[variable]
            items = [item.strip() for item in text.split(",") if item.strip()]
            yield variable, name, items if kind == "list" else text
        elif variable.startswith(prefix) or _is_misspelt(variable, known):
            raise InvalidArgumentError(_unknown("environment variable", variable, known))


def _is_misspelt(variable: str, known: Iterable[str]) -> bool:
    """Whether a variable is close to a known one. Users may have other variables that begin with GPUSCALE_."""
    name = variable.removeprefix(PREFIX)
    if name == variable or any(name.startswith(f"{table.upper()}_") for table in TABLES):
        return False
    import difflib

    return bool(difflib.get_close_matches(variable, list(known), n=1, cutoff=_MISSPELT))


class _Parser(argparse.ArgumentParser):
    """A parser that prints errors as one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def _kinds(settings_type: type[Settings]) -> dict[str, _Kind]:
    """Kind of each field by its type; for a union, by its first member except None."""
    kinds: dict[str, _Kind] = {}
    for name, field in settings_type.model_fields.items():
        annotation: Any = field.annotation
        if get_origin(annotation) in {Union, UnionType}:
            annotation = next(member for member in get_args(annotation) if member is not type(None))
        base = get_origin(annotation) or annotation
        own: list[_Kind] = [
            kind for types, kind in _KIND_OF if isinstance(base, type) and issubclass(base, types)
        ]
        kinds[name] = own[0] if own else "value"
    return kinds


def _unknown(kind: str, name: str, known: Iterable[str], where: str = "") -> str:
    import difflib  # 0.7 MB, needed only after mistakes

    near = difflib.get_close_matches(name, list(known), n=1)
    return f"unknown {kind} {name}{where}" + (f" (did you mean {near[0]}?)" if near else "")


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif is_table(value):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, (list, tuple)):
        for item in cast("Sequence[object]", value):
            yield from _texts(item)


def is_table(value: object) -> TypeGuard[Mapping[str, object]]:
    """Whether a TOML value is a table."""
    return isinstance(value, Mapping)
