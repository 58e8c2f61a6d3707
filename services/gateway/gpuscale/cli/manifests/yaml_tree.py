"""YAML as a tree of texts with their places; the schema gives them types.

The only file that knows the YAML library's untyped nodes. Anchors and aliases are refused, since they can blow up a small
file; keys are unique; a scalar is its text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any, Final

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from gpuscale.common.errors import InvalidArgumentError

MAX_CHARACTERS: Final = 1 << 20
_NULL: Final = "tag:yaml.org,2002:null"


class ManifestError(InvalidArgumentError):
    """A file that cannot be understood; the message begins with `file:line:column`."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where something stands; lines and columns count from 1."""

    source: str
    line: int
    column: int

    def error(self, text: str) -> ManifestError:
        """The error to raise about what stands here."""
        return ManifestError(f"{self.source}:{self.line}:{self.column}: {text}")


@dataclass(frozen=True, slots=True)
class Scalar:
    """A single value: its text, and whether it is a null."""

    place: Place
    text: str
    null: bool


@dataclass(frozen=True, slots=True)
class Items:
    """A list."""

    place: Place
    items: "Sequence[Tree]"


@dataclass(frozen=True, slots=True)
class Entries:
    """A mapping, in the order of the file; keys are unique."""

    place: Place
    entries: "Sequence[tuple[Scalar, Tree]]"


Tree = Scalar | Items | Entries


def read_documents(text: str, source: str) -> list[Tree]:
    """The documents of a text that are not empty; `source` is its name in errors.

    Raises:
        ManifestError: it is not YAML, or uses what is refused.
    """
    start = Place(source, 1, 1)
    if len(text) > MAX_CHARACTERS:
        raise start.error(f"more than {MAX_CHARACTERS} characters")
    try:
        yaml: Any = YAML(typ="safe", pure=True)
        # An empty document, such as after a last `---`, is a null.
        return [_tree(node, source) for node in yaml.compose_all(StringIO(text)) if node.tag != _NULL]
    except MarkedYAMLError as error:
        marked: Any = error
        mark = marked.problem_mark or marked.context_mark
        place = Place(source, mark.line + 1, mark.column + 1) if mark else start
        raise place.error(f"{marked.problem or marked.context}") from error
    except RecursionError as error:
        raise start.error("nested too deeply") from error
    except YAMLError as error:
        raise start.error(str(error).partition("\n")[0]) from error


def _tree(node: Any, source: str) -> Tree:
    place = Place(source, node.start_mark.line + 1, node.start_mark.column + 1)
    if node.anchor is not None:
        raise place.error("anchors and aliases are not allowed")
    if node.id == "mapping":
        return Entries(place, _entries(node, source))
    if node.id == "sequence":
        return Items(place, [_tree(child, source) for child in node.value])
    return Scalar(place, str(node.value), null=node.tag == _NULL)


def _entries(node: Any, source: str) -> list[tuple[Scalar, Tree]]:
    entries: list[tuple[Scalar, Tree]] = []
    seen: set[str] = set()
    for key_node, value_node in node.value:
        key = _tree(key_node, source)
        if not isinstance(key, Scalar):
            raise key.place.error("a key must be a single value")
        if key.text in seen:
            raise key.place.error(f"{key.text} is given twice")
        seen.add(key.text)
        entries.append((key, _tree(value_node, source)))
    return entries
