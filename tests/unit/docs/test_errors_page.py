"""docs/errors.md explains every status, reason and exit code that the code has, and none that it has not."""

import ast
import re
from collections.abc import Iterator

from gpuscale.cli.grammar.exit_codes import MEANINGS, ExitCode
from gpuscale.common import errors
from gpuscale.common.rpc.status import status_code
from tests.unit.docs.pages import SERVICES, read, rows

REASON = r"[A-Z]+(?:_[A-Z]+)*"


def nodes() -> Iterator[ast.AST]:
    for path in sorted(SERVICES.rglob("*.py")):
        yield from ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def texts(value: ast.AST | None) -> set[str]:
    """The texts in an expression, those of both branches of a choice too."""
    inner = ast.walk(value) if value is not None else ()
    return {node.value for node in inner if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def names_default_reason(node: ast.Assign | ast.AnnAssign) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return any(isinstance(target, ast.Name) and target.id == "default_reason" for target in targets)


def is_enum_of_kinds(node: ast.ClassDef) -> bool:
    """Whether a class is an enum such as RefusalKind, whose values are used as reasons."""
    named = [base.id for base in node.bases if isinstance(base, ast.Name)]
    return node.name.endswith("Kind") and "StrEnum" in named


def reasons() -> set[str]:
    """Every reason that an error can carry: written where the error is made, or the value of a kind."""
    found: set[str] = set()
    for node in nodes():
        if (isinstance(node, ast.keyword) and node.arg == "reason") or (
            isinstance(node, ast.Assign | ast.AnnAssign) and names_default_reason(node)
        ):
            found |= texts(node.value)
        elif isinstance(node, ast.ClassDef) and is_enum_of_kinds(node):
            found |= {
                text for item in node.body if isinstance(item, ast.Assign) for text in texts(item.value)
            }
    return {reason for reason in found if re.fullmatch(REASON, reason)}


def explained() -> dict[str, str]:
    """Each reason that the page explains, and the second cell of its row: the status it comes with."""
    table = (cells for cells in rows(read("errors.md")) if re.fullmatch(f"`{REASON}`", cells[0]))
    return {cells[0].strip("`"): cells[1] for cells in table if not cells[1].endswith("Error`")}


def test_every_reason_is_explained() -> None:
    assert len(reasons()) > 50, "the search finds the reasons"
    assert sorted(reasons() - explained().keys()) == []


def test_no_reason_is_explained_that_cannot_happen() -> None:
    assert sorted(explained().keys() - reasons()) == []


def test_every_status_is_explained_with_its_error() -> None:
    table = (cells for cells in rows(read("errors.md")) if cells[1].endswith("Error`"))
    shown = {cells[0].strip("`"): cells[1].strip("`") for cells in table}
    for cls in errors.GpuscaleError.__subclasses__():
        if cls.__module__ == errors.__name__:
            assert shown[status_code(cls("")).name] == cls.__name__


def test_every_exit_code_is_explained() -> None:
    found = {cells[0]: cells[1] for cells in rows(read("errors.md")) if cells[0].isdigit()}
    assert found == {str(code.value): MEANINGS[code] for code in ExitCode}
