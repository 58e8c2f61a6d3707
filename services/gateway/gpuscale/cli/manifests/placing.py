"""Where in a file the fields stand that a rule of the contract, or the server, finds fault with."""

import re

from gpuscale.cli.grammar.jsonpath import camel
from gpuscale.cli.manifests.yaml_tree import Entries, Items, Place, Tree
from gpuscale.common.errors import InvalidArgumentError

_STEP = re.compile(r"\w+|\[\d+\]")


def place_of(tree: Tree, path: str) -> Place:
    """The place of a field such as `spec.rules[2].step`; where it is missing, that of what it is missing in."""
    for step in _STEP.findall(path):
        inner = _inner(tree, step)
        if inner is None:
            break
        tree = inner
    return tree.place


def _inner(tree: Tree, step: str) -> Tree | None:
    if isinstance(tree, Items):
        index = int(step[1:-1]) if step.startswith("[") else len(tree.items)
        return tree.items[index] if index < len(tree.items) else None
    if isinstance(tree, Entries):
        return next((value for key, value in tree.entries if key.text in {step, camel(step)}), None)
    return None


def placed(error: InvalidArgumentError, tree: Tree, prefix: str = "") -> InvalidArgumentError:
    """The error with the place of each field at fault; `prefix` is what the path in the file lacks."""
    if not error.violations:
        return tree.place.error(error.message)
    lines: list[str] = []
    for one in error.violations:
        path = one.field.removeprefix(prefix)
        place = place_of(tree, path)
        lines.append(f"{place.source}:{place.line}:{place.column}: {path} {one.description}")
    return InvalidArgumentError("\n".join(lines), reason=error.reason, violations=error.violations)
