# The part of simpleeval that is used here.

import ast
from ast import AST
from collections.abc import Callable, Mapping

DEFAULT_OPERATORS: dict[type[AST], Callable[..., object]]

class InvalidExpression(Exception): ...  # noqa: N818 - the name is simpleeval's

class SimpleEval:
    def __init__(
        self,
        operators: Mapping[type[AST], Callable[..., object]] | None = None,
        functions: Mapping[str, Callable[..., object]] | None = None,
        names: Mapping[str, float] | None = None,
    ) -> None: ...
    def eval(self, expr: str, previously_parsed: ast.expr | None = None) -> object: ...
