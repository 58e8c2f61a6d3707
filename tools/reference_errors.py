"""The page of all reasons of errors, from the places where errors are made: status, exit code and message."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpuscale.allocator.placing.constraints import Obstacle
from gpuscale.cli.console.errors import exit_code, writing
from gpuscale.common import errors
from gpuscale.common.rpc.status import status_code
from gpuscale.common.secrets import DatabaseUnavailableError

ROOT = Path(__file__).resolve().parent.parent
HEAD = """# Every reason

Written by `make docs` from the places where errors are made. [errors.md](../errors.md) says how errors travel and what to do about those
that need more than their message.

## Statuses

| status | error of `gpuscale.client` | what |
| --- | --- | --- |
{statuses}
## Reasons

Words in braces stand for what is filled in; a reason without a message gets it from where the error
happens. The exit code is that of `gpuscalectl`.

| reason | status | exit code | metadata | message |
| --- | --- | --- | --- | --- |
"""
REASON = re.compile(r"[A-Z]+(?:_[A-Z]+)*")
MOST_MESSAGES = 4
ELSEWHERE = {
    "UNSATISFIABLE": "FailedPreconditionError",
    "NODE_NOT_ONLINE": "FailedPreconditionError",
    "CODE_FILE": "FailedPreconditionError",
    "LEASE_NOT_CHECKED": "UnavailableError",
    **dict.fromkeys(
        (
            "UNKNOWN_AUTHORITY",
            "CERTIFICATE_EXPIRED",
            "OTHER_HOST",
            "CLIENT_CERTIFICATE",
            "PLAINTEXT_SERVER",
            "TLS_SERVER",
        ),
        "UnavailableError",
    ),
}
"""Errors of reasons that are put together far from where the error is made."""
_OF_PLACEMENT = {
    *(
        "gpu_count",
        "min_memory_bytes",
        "member_count",
        "placed_member_count",
        "nearest_node",
        "nearest_gpu_count",
    ),
    *(obstacle.lower() for obstacle in Obstacle),
}
METADATA = {
    "INTERNAL": {"request_id"},
    **dict.fromkeys(("NO_CAPACITY", "UNSATISFIABLE", "NODE_NOT_ONLINE"), _OF_PLACEMENT),
}
"""Keys of metadata that are put together far from where the error is made."""
CLASSES = {
    cls.__name__: cls
    for cls in [*vars(errors).values(), DatabaseUnavailableError]
    if isinstance(cls, type) and issubclass(cls, errors.GpuscaleError)
}


@dataclass
class Reason:
    """What is known of a reason: the errors that carry it, what they say, and the keys of their metadata."""

    kinds: set[str] = field(default_factory=set[str])
    messages: list[str] = field(default_factory=list[str])
    metadata: set[str] = field(default_factory=set[str])


def page() -> str:
    """The whole page."""
    statuses = (
        f"| `{status_code(cls('')).name}` | `{name}` | {_meaning(cls)} |\n"
        for name, cls in CLASSES.items()
        if cls.__base__ is errors.GpuscaleError
    )
    return HEAD.replace("{statuses}", "".join(statuses)) + "".join(_rows(reasons()))


def _meaning(cls: type[errors.GpuscaleError]) -> str:
    """The first paragraph of the docstring of an error."""
    return " ".join((cls.__doc__ or "").partition("\n\n")[0].split())


def reasons() -> Mapping[str, Reason]:
    """Every reason that an error can carry: written where the error is made, a default, or the value of a kind."""
    found: dict[str, Reason] = {}
    for path in sorted([*ROOT.glob("services/**/*.py"), *ROOT.glob("addons/*/gpuscale_*/*.py")]):
        if "testing" in path.parts:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        constants = {name: text for node in tree.body for name, text in _constants(node)}
        for scope in ast.walk(tree):
            if isinstance(scope, ast.ClassDef):
                _from_class(scope, found)
            elif isinstance(scope, ast.Call):
                _from_call(scope, constants, found)
            elif isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
                _messages(scope, constants, found)
    return {reason: found[reason] for reason in sorted(found)}


def _from_class(node: ast.ClassDef, found: dict[str, Reason]) -> None:
    bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
    is_kind = node.name.endswith("Kind") and "StrEnum" in bases
    for item in node.body:
        for name, text in _constants(item):
            if name == "default_reason" or is_kind:
                _add(found, text).kinds |= {node.name} & CLASSES.keys() or bases & CLASSES.keys()


def _from_call(node: ast.Call, constants: Mapping[str, str], found: dict[str, Reason]) -> None:
    for text in _reasons_of(node, constants):
        _add(found, text).metadata |= _keys(node)
        if (name := _class_of(node)) is not None:
            _add(found, text).kinds.add(name)
        else:
            _add(found, text)
    if (error := _made(node)) is not None:
        reason = _add(found, error.reason)
        reason.kinds.add(type(error).__name__)
        reason.metadata |= error.metadata.keys()
        reason.messages += [error.message] if error.message not in reason.messages else []
    if len(node.args) > 1 and isinstance(first := node.args[0], ast.Constant) and first.value in ELSEWHERE:
        reason = _add(found, str(first.value))
        reason.messages += [text for text in [_said(node.args[1])] if text and text not in reason.messages]


def _made(call: ast.Call) -> errors.GpuscaleError | None:
    """The error of a call of a function that makes one, with a word in braces for each thing that is filled in."""
    name = getattr(call.func, "id", "")
    if name == errors.request_id_reused.__name__:
        return errors.request_id_reused("{request_id}")
    if ast.unparse(call.func) in {"NotFoundError.of", "NotFoundError.unless"}:
        return errors.NotFoundError.of("{name}")
    if name == writing.__name__:
        place = Path("{" + _word(call.args[0]) + "}") if call.args else None
        try:
            with writing(place, **{one.arg: _said(one.value) for one in call.keywords if one.arg}):
                raise OSError(0, "{strerror}", "{filename}")
        except errors.FailedPreconditionError as error:
            return error
    return None


def _messages(
    scope: ast.FunctionDef | ast.AsyncFunctionDef, constants: Mapping[str, str], found: dict[str, Reason]
) -> None:
    """What the errors that a function makes say; a message may have a name there."""
    named = [
        (node.lineno, target.id, node.value)
        for node in ast.walk(scope)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    ]
    for node in ast.walk(scope):
        if isinstance(node, ast.Call) and _class_of(node) is not None and node.args:
            first = node.args[0]
            if isinstance(first, ast.Name):  # what it was given last
                before = [one for one in named if one[1] == first.id and one[0] < node.lineno]
                first = max(before, key=lambda one: one[0])[2] if before else first
            text = _said(first)
            for reason in _reasons_of(node, constants):
                if text and text not in (told := _add(found, reason).messages):
                    told.append(text)


def _add(found: dict[str, Reason], text: str) -> Reason:
    return found.setdefault(text, Reason())


def _constants(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Names that are given to texts which look like reasons."""
    targets = (
        node.targets
        if isinstance(node, ast.Assign)
        else [node.target]
        if isinstance(node, ast.AnnAssign)
        else []
    )
    value = getattr(node, "value", None)
    if isinstance(value, ast.Constant) and isinstance(value.value, str) and REASON.fullmatch(value.value):
        yield from ((target.id, value.value) for target in targets if isinstance(target, ast.Name))


def _reasons_of(call: ast.Call, constants: Mapping[str, str]) -> list[str]:
    """The reasons that a call states, both where one of two is."""
    values = [keyword.value for keyword in call.keywords if keyword.arg == "reason"]
    inner = [node for value in values for node in ast.walk(value)]
    texts = [node.value for node in inner if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    texts += [constants[node.id] for node in inner if isinstance(node, ast.Name) and node.id in constants]
    if not values and (cls := CLASSES.get(_class_of(call) or "")) is not None:
        texts.append(cls.default_reason)
    return [text for text in texts if REASON.fullmatch(text)]


def _keys(call: ast.Call) -> set[str]:
    """The keys of metadata that a call states, at least those that may be left out."""
    values = [keyword.value for keyword in call.keywords if keyword.arg == "metadata"]
    inner = [
        key for value in values for node in ast.walk(value) if isinstance(node, ast.Dict) for key in node.keys
    ]
    return {key.value for key in inner if isinstance(key, ast.Constant) and isinstance(key.value, str)}


def _class_of(call: ast.Call) -> str | None:
    name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
    return name if name in CLASSES else None


def _said(node: ast.AST) -> str:
    """A text with a word in braces for each thing that is filled in; empty where it cannot be told."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _said(node.left), _said(node.right)
        return left + right if left and right else ""
    if not isinstance(node, ast.JoinedStr):
        return ""
    return "".join(str(part.value) if isinstance(part, ast.Constant) else _word(part) for part in node.values)


def _first_word(parts: Iterable[ast.AST]) -> str:
    return next((word for part in parts if (word := _word(part))), "")


def _word(part: ast.AST) -> str:
    """What stands for an expression that is filled in: its last name."""
    if isinstance(part, ast.FormattedValue):
        return "{" + (_word(part.value) or "...") + "}"
    if isinstance(part, ast.Call):
        return _first_word(part.args) or _word(part.func)
    if isinstance(part, ast.Attribute):
        return part.attr.strip("_").lower()
    if isinstance(part, ast.Name):
        return part.id.strip("_").lower()
    return _first_word(ast.iter_child_nodes(part))


def _rows(found: Mapping[str, Reason]) -> Iterator[str]:
    for reason, told in found.items():
        kinds = {*told.kinds, *((ELSEWHERE[reason],) if reason in ELSEWHERE else ())}
        if not kinds:
            raise ValueError(f"{reason}: no error is found that carries it; name its class in ELSEWHERE")
        made = [CLASSES[kind]("", reason=reason) for kind in sorted(kinds)]
        known = [status_code(error).name for error in made if type(error) is not errors.GpuscaleError]
        statuses = dict.fromkeys(known)
        codes = sorted({exit_code(error).value for error in made})
        keys = ", ".join(f"`{key}`" for key in sorted(told.metadata | METADATA.get(reason, set[str]())))
        texts = "<br>".join(_cell(text) for text in told.messages[:MOST_MESSAGES])
        yield f"| `{reason}` | {', '.join(statuses)} | {', '.join(map(str, codes))} | {keys} | {texts} |\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[")
