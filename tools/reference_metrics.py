"""The reference page of `/metrics`: the readings by their names, ours and DCGM's, and all other series with their labels.

The others are read from the source, where each is a `Family`, and is added to a page with its labels.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

from gpuscale.monitor.model.prometheus import DCGM, DCGM_CHECKED, GPU, HOST, PROCESS, ReadingSeries

HEAD = """# Every series of /metrics

Written by `make docs` from the code. [Metrics](../metrics.md) says where these series are shown.

"""
SERVICES = Path(__file__).resolve().parent.parent / "services"
SOURCES = {
    "Of GPUs and nodes, besides readings": "monitor/exposition/snapshots.py",
    "Of an agent": "monitor/exposition/agent.py",
    "Of the fleet": "monitor/exposition/fleet.py",
    "Of every service, by its name": "common/rpc/meter.py",
    "Of the databases of allocator, autoscaler and fleet": "common/store/store.py",
    "Of the allocator": "allocator/app.py",
    "Of the autoscaler": "autoscaler/app.py",
    "Of every adapter": "autoscaler/adapters/main.py",
    "Of the dashboard": "dashboard/figures.py",
}
"""The files with families that are no readings, below `gpuscale`."""
_GPU_LABELS = ("node", "gpu", "uuid")
PASSED = {"own_labels": _GPU_LABELS, "dcgm_labels": _GPU_LABELS, "named": ("adapter", "engine", "version")}
"""Labels that come from elsewhere, by what holds or makes them."""


def page() -> str:
    """The text of the page."""
    of_processes = "Labels: `node`, `gpu`, `uuid`, `pid`, `user`, `program`, `container`, `namespace`, `pod`, `reservation`.\n\n"
    heads = ("series", "reading", "what")
    parts = {
        "GPUs": _gpus(),
        "Processes": of_processes + _table(heads, _rows(PROCESS)),
        "Hosts": _table(heads, _rows(HOST)),
    }
    for title, file in SOURCES.items():
        [path] = SERVICES.glob(f"*/gpuscale/{file}")
        parts[title] = _table(("series", "labels", "what"), Source(path).rows())
    return HEAD + "\n".join(f"## {title}\n\n{text}" for title, text in parts.items())


class Source:
    """The families of one file."""

    def __init__(self, path: Path) -> None:
        self._tree = ast.parse(path.read_text(encoding="utf-8"))
        found = ast.walk(self._tree)
        self._scopes = [node for node in found if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        self._functions = {node.name: node for node in self._scopes}

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """(name, labels, what) of each, in the order of the file."""
        labels = dict(self._labels())
        calls = [node for node in ast.walk(self._tree) if isinstance(node, ast.Call) and len(node.args) > 1]
        for made in sorted(calls, key=lambda node: node.lineno):
            if ast.unparse(made.func) in {"Family", "gauge", "counter"}:
                name = self._text(made.args[0])
                if not name.startswith("DCGM"):
                    shown = ", ".join(f"`{one}`" for one in labels[name])
                    yield f"`{name}`", shown, self._text(made.args[-1])

    def _labels(self) -> Iterator[tuple[str, list[str]]]:
        """The labels with which each family is added to a page, by its name."""
        for scope in self._scopes:
            for node in ast.walk(scope):
                if not (isinstance(node, ast.Call) and ast.unparse(node.func).startswith("page.add")):
                    continue
                made = self._value(node.args[0], scope)
                if isinstance(made, ast.Call) and made.args:
                    name = self._text(made.args[0])
                    yield name, list(dict.fromkeys(self._keys(node.args[1], scope)))

    def _text(self, node: ast.expr) -> str:
        """A text; where the prefix comes from elsewhere, that of any service."""
        match self._value(node, self._tree):
            case ast.Constant(value=str(text)):
                return text
            case ast.JoinedStr(values=parts):
                return "".join(map(self._text, parts))
            case ast.FormattedValue(value=part):
                return self._text(part)
            case other:
                return "gpuscale_SERVICE" if ast.unparse(other).endswith("prefix") else "SERVICE"

    def _value(self, node: ast.expr, scope: ast.AST) -> ast.expr:
        """What a name stands for, in a function or else in the file."""
        if isinstance(node, ast.Name):
            for place in (scope, self._tree):
                for target, value in _named(place):
                    if ast.unparse(target) == node.id:
                        return value
        return node

    def _keys(self, node: ast.expr, scope: ast.AST) -> Iterator[str]:
        """The names of the labels that an expression makes."""
        match self._value(node, scope):
            case ast.Constant():
                return
            case ast.Dict(keys=keys, values=values):
                for key, value in zip(keys, values, strict=True):
                    yield from self._keys(value, scope) if key is None else [ast.literal_eval(key)]
            case ast.BinOp(left=left, right=right):
                yield from self._keys(left, scope)
                yield from self._keys(right, scope)
            case (
                ast.SetComp(elt=made)
                | ast.Subscript(value=made)
                | ast.Call(func=ast.Name("labels" | "sorted"), args=[made])
            ):
                yield from self._keys(made, scope)
            case ast.Call(func=ast.Name(name)) if name in self._functions and name not in PASSED:
                [returned] = [one for one in ast.walk(self._functions[name]) if isinstance(one, ast.Return)]
                yield from self._keys(returned.value or ast.Constant(""), self._functions[name])
            case ast.DictComp():
                yield from _GPU_LABELS
            case ast.Call(func=ast.Name(name)) | ast.Name(name) | ast.Attribute(attr=name):
                yield from PASSED[name]
            case other:
                raise ValueError(f"no labels can be read from {ast.unparse(other)}")


def _named(place: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What is given a name there, and what that is; of a loop, what it goes over."""
    for one in ast.walk(place):
        if isinstance(one, ast.For | ast.comprehension):
            yield one.target, one.iter
        elif isinstance(one, ast.Assign):
            of, value = one.targets[0], one.value
            if isinstance(of, ast.Tuple) and isinstance(value, ast.Tuple):
                yield from zip(of.elts, value.elts, strict=True)
            else:
                yield of, value


def _gpus() -> str:
    own, checked = {one.field: one for one in GPU}, {one.field for one in DCGM_CHECKED}
    dcgm = {one.field: f"`{one.family.name}`" for one in DCGM}
    dcgm |= {field: f"{name}, not in `checked`" for field, name in dcgm.items() if field not in checked}
    rows = [
        (series, dcgm.get(field, "-"), f"`{field}`", what) for series, field, what in _rows(GPU, code=False)
    ]
    rows += [
        ("-", dcgm[one.field], f"`{one.field}`", one.family.help) for one in DCGM if one.field not in own
    ]
    return _table(("series", "of DCGM", "reading", "what"), rows)


def _rows(series: Iterable[ReadingSeries], *, code: bool = True) -> list[tuple[str, str, str]]:
    return [
        (f"`{one.family.name}`", f"`{one.field}`" if code else one.field, one.family.help) for one in series
    ]


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
