"""`filter` and `order_by` of List and Watch methods: a subset of AIP-160 and AIP-132, checked against the resource's type.

    holder = "train" AND (gpus.node:"alpha" OR labels.team = "vision*") AND NOT state = LOST

A restriction is a field, an operator and a value. Operators are `=`, `!=`, `<`, `<=`, `>`, `>=`, and `:` for "has": an
item in a list, a key in a map, a substring of a text; `field:*` tests presence. A leading or trailing `*` in a text is a
wildcard. As in AIP-160, OR binds tighter than AND. An absent field matches no comparison; `!=` is NOT `=`.

`listed` and `listed_in_turns` apply both to a List method.
"""

import json
import math
import operator
import re
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from operator import itemgetter
from types import coroutine
from typing import Any, ParamSpec, Protocol, TypeVar, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from gpuscale.common.errors import InvalidArgumentError
from gpuscale.common.sizes import parse_duration
from gpuscale.common.wire import forged_token, last_key, page_limit, to_token

Test = Callable[[Any], bool]
Reader = Callable[[Any], Iterable[Any]]
"""Reads the values of a field from a message: none if absent, several from a list."""

_MOST_NESTED = 32
_MOST_NAMED = 12
_NANOS = 1_000_000_000
_TIMESTAMP, _DURATION = Timestamp.DESCRIPTOR.full_name, Duration.DESCRIPTOR.full_name
_ORDERS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "=": operator.eq}
_UNSORTED = {FieldDescriptor.TYPE_MESSAGE, FieldDescriptor.TYPE_BYTES}
_QUOTED = r'"(?:[^"\\]|\\.)*"'


def compile_filter(text: str, of: type[Message], field: str = "filter") -> Test:
    """A predicate for messages of type `of`; an empty filter accepts all.

    Raises InvalidArgumentError: invalid filter; the error names the field and the position.
    """
    return _Parser(text, of, field).filter() if text.strip() else lambda _: True


def required_texts(text: str, of: type[Message]) -> Mapping[str, str]:
    """The texts that fields must have to meet a filter, by their paths as written; there may be more. Raises as `compile_filter`.

    An index may use them: what has other texts there cannot meet the filter.
    """
    parser = _Parser(text, of, "filter")
    if text.strip():
        parser.filter()
    return parser.required


def compile_order(text: str, of: type[Message]) -> Callable[[Any], tuple["SortValue", ...]]:
    """A sort key for messages of type `of`, such as `state, create_time desc`. Absent values sort as the smallest.

    Raises InvalidArgumentError: invalid order; the error names the field and the position.
    """
    ranks = _Parser(text, of, "order_by").order() if text.strip() else []
    return lambda message: tuple(rank(message) for rank in ranks)


@dataclass(frozen=True, slots=True)
class SortValue:
    """A sort key. None is the smallest value; `down` reverses the order."""

    value: Any
    down: bool

    def __lt__(self, other: "SortValue") -> bool:
        first, second = (other.value, self.value) if self.down else (self.value, other.value)
        return second is not None and (first is None or bool(first < second))


@dataclass(frozen=True, slots=True)
class _Path:
    """A field path: `read` yields values of the field `leaf`, `several` if the path goes through a list or map.

    Unless `certain`, a value may be the default of a field without presence.
    """

    leaf: FieldDescriptor
    read: Reader
    several: bool
    certain: bool


class _Parser:
    """Parses one filter or order from left to right."""

    def __init__(self, text: str, of: type[Message], field: str) -> None:
        self._text, self._field = text, field
        self._of: Any = of.DESCRIPTOR  # the stubs have two classes for it
        self._start = self._at = 0  # positions of the last token, and of the next
        self.required: dict[str, str] = {}
        self._whole: str | None = None  # the text that the last value has to equal, if it has to

    def filter(self) -> Test:
        test = self._all(0)
        self._expect_end("AND, OR or the end")
        return test

    def order(self) -> list[Callable[[Any], SortValue]]:
        found: list[Callable[[Any], SortValue]] = []
        while not found or self._take(","):
            at, field = self._at, self._path()
            if field.several or not (_is_time(field.leaf) or field.leaf.type not in _UNSORTED):
                raise self._wrong("there is nothing here to sort by", at)
            found.append(_ranked(field.read, self._take(r"(?:asc|desc)\b") == "desc"))
        self._expect_end("a comma or the end")
        return found

    def _all(self, depth: int) -> Test:
        tests = [self._any(depth)]
        while self._take(r"AND\b"):
            tests.append(self._any(depth))
        return tests[0] if len(tests) == 1 else lambda message: all(test(message) for test in tests)

    def _any(self, depth: int) -> Test:
        required, tests = self.required.copy(), [self._one(depth)]
        while self._take(r"OR\b"):
            tests.append(self._one(depth))
            self.required = required.copy()
        return tests[0] if len(tests) == 1 else lambda message: any(test(message) for test in tests)

    def _one(self, depth: int) -> Test:
        if depth > _MOST_NESTED:
            raise self._wrong("nested too deeply")
        if self._take(r"NOT\b"):
            test = self._one(depth + 1)
            return lambda message: not test(message)
        if self._take(r"\("):
            test = self._all(depth + 1)
            if self._take(r"\)") is None:
                raise self._wrong("expected AND, OR or )")
            return test
        at, field = self._at, self._path()
        name, sign = self._text[at : self._at].strip(), self._take(r"[<>!]=|[<>=:]")
        if sign is None:
            raise self._wrong("expected one of = != < <= > >= :")
        if field.several and sign != ":":
            raise self._wrong("what a list or map has is asked with :")
        negated, test = sign == "!=", self._value_test(field, sign.replace("!=", "="))
        if self._whole is not None and not (negated or depth):
            self.required[name] = self._whole
        return lambda message: negated != any(test(value) for value in field.read(message))

    def _path(self) -> _Path:
        read: Reader = lambda message: (message,)  # noqa: E731
        field, of_key, several = self._known(self._of, *self._segment()), False, False
        while self._take(r"\."):
            name, at = self._segment()
            inner = field.message_type
            if inner is None:
                raise self._wrong("there are no fields here", at)
            if _is_map(field):
                read, of_key = _then(read, _value_of_key(field.name, name)), True
                field = inner.fields_by_name["value"]
                continue
            if not of_key:  # else `read` yields its values already
                read, several = _then(read, _values_of(field)), several or field.is_repeated
            field, of_key = self._known(inner, name, at), False
        if not of_key:
            read, several = _then(read, _values_of(field)), several or field.is_repeated
        if field.message_type is not None and _is_map(field):
            field = field.message_type.fields_by_name["key"]
        if _is_time(field):
            read = _then(read, lambda time: (time.seconds * _NANOS + time.nanos,))
        return _Path(field, read, several, of_key or several or field.has_presence)

    def _segment(self) -> tuple[str, int]:
        found = self._take(rf"[\w-]+|{_QUOTED}")
        if found is None:
            raise self._wrong("expected a field")
        return re.sub(r"\\(.)", r"\1", found[1:-1]) if found[0] == '"' else found, self._start

    def _known(self, of: Descriptor, name: str, at: int) -> FieldDescriptor:
        field = of.fields_by_name.get(name) or of.fields_by_camelcase_name.get(name)
        if field is None:
            raise self._wrong(f"{of.name} has no field {name!r}", at)
        return field

    def _value_test(self, field: _Path, sign: str) -> Test:
        raw = self._take(rf'{_QUOTED}|[^\s"(),<>=!]+')
        if raw is None:
            raise self._wrong("expected a value")
        text, leaf, self._whole = raw[1:-1] if raw[0] == '"' else raw, field.leaf, None
        if sign == ":" and text == "*":
            return (lambda _: True) if field.certain else bool
        if leaf.type == FieldDescriptor.TYPE_STRING and sign in "=:":
            # Whether a text equals the value, with wildcards at its ends, or contains it.
            part = sign == ":" and not field.several
            pieces: list[str] = re.findall(r"\\.|.", text, re.DOTALL)
            before = part or pieces[:1] == ["*"]
            after = part or pieces[-1:] == ["*"]
            inner = "".join(piece[-1] for piece in pieces[before - part : len(pieces) - (after - part)])
            if before:
                return lambda value: inner in value if after else value.endswith(inner)
            self._whole = None if after else inner
            return lambda value: value.startswith(inner) if after else value == inner
        if leaf.type in {FieldDescriptor.TYPE_ENUM, FieldDescriptor.TYPE_BOOL} and sign not in "=:":
            raise self._wrong("this field is asked with = or !=", self._start)
        try:
            wanted = _value(leaf, text)
        except (ValueError, KeyError):
            raise self._wrong(f"expected {_kind(leaf, text)}", self._start) from None
        compare = _ORDERS["=" if sign == ":" else sign]
        return lambda value: compare(value, wanted)

    def _take(self, pattern: str) -> str | None:
        found = re.compile(rf"\s*({pattern})\s*").match(self._text, self._at)
        if found:
            self._start, self._at = found.start(1), found.end()
        return found[1] if found else None

    def _expect_end(self, what: str) -> None:
        if self._take(r"\Z") is None:
            raise self._wrong(f"expected {what}")

    def _wrong(self, what: str, at: int | None = None) -> InvalidArgumentError:
        place = (self._at if at is None else at) + 1
        return InvalidArgumentError(f"{self._field}, at character {place}: {what}", field=self._field)


def _then(first: Reader, second: Reader) -> Reader:
    return lambda message: (value for inner in first(message) for value in second(inner))


def _values_of(field: FieldDescriptor) -> Reader:
    name, presence = field.name, field.has_presence
    if field.is_repeated:
        return operator.attrgetter(name)
    return lambda message: (getattr(message, name),) if not presence or message.HasField(name) else ()


def _value_of_key(name: str, key: str) -> Reader:
    return lambda message: (getattr(message, name)[key],) if key in getattr(message, name) else ()


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _is_time(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.full_name in {_TIMESTAMP, _DURATION}


def _ranked(read: Reader, down: bool) -> Callable[[Any], SortValue]:
    def rank(message: Any) -> SortValue:
        value = next(iter(read(message)), None)
        return SortValue(None if value != value else value, down)  # NaN has no order

    return rank


def _value(leaf: FieldDescriptor, text: str) -> Any:
    """Parse a value for comparison with a field; ValueError or KeyError for an invalid one."""
    if leaf.type == FieldDescriptor.TYPE_STRING:
        return re.sub(r"\\(.)", r"\1", text)
    if leaf.type == FieldDescriptor.TYPE_BOOL:
        return {"true": True, "false": False}[text.lower()]
    if leaf.enum_type is not None:
        prefix = leaf.enum_type.values_by_number[0].name.removesuffix("UNSPECIFIED")
        return leaf.enum_type.values_by_name[prefix + text.upper().removeprefix(prefix)].number
    if leaf.message_type is None and leaf.type != FieldDescriptor.TYPE_BYTES:
        number = int(text) if re.fullmatch(r"-?\d+", text) else float(text)
        if math.isfinite(number):
            return number
    kind = "" if leaf.message_type is None else leaf.message_type.full_name
    if kind == _TIMESTAMP:
        time = Timestamp()
        time.FromJsonString(text)
        return time.ToNanoseconds()
    if kind == _DURATION:
        return round(parse_duration(text) * _NANOS)
    raise ValueError("not comparable")


def _kind(leaf: FieldDescriptor, text: str) -> str:
    """What `_value` expects in place of a text, in words."""
    if leaf.message_type is not None:
        kinds = {_TIMESTAMP: "a time such as 2026-03-01T12:30:00Z", _DURATION: "a duration such as 30s"}
        return kinds.get(leaf.message_type.full_name, "one of its fields, or :*")
    if leaf.enum_type is not None:
        none, *values = (one.name for one in leaf.enum_type.values)
        names = [one.removeprefix(none.removesuffix("UNSPECIFIED")) for one in values]
        near = get_close_matches(text.upper(), names, 5, 0.0) if len(names) > _MOST_NAMED else ()
        return f"a value such as {' or '.join(near)}" if near else " or ".join(names)
    return {FieldDescriptor.TYPE_BOOL: "true or false", FieldDescriptor.TYPE_BYTES: ":*"}.get(
        leaf.type, "a number"
    )


class ListRequest(Protocol):
    """The fields that every List request has."""

    page_size: int
    page_token: str
    filter: str
    order_by: str


AT_ONCE = 128
"""Items of a list that `listed_in_turns` reads before other tasks may run."""
Item = TypeVar("Item")
P = ParamSpec("P")
T = TypeVar("T")
M = TypeVar("M", bound=Message)


def _listing(
    items: Sequence[Item] | Callable[[str], Iterable[Item]],
    request: ListRequest,
    of: type[M],
    *,
    key: Callable[[Item], str],
    encode: Callable[[Item], M],
    descending: bool = False,
) -> Generator[None, None, tuple[list[M], str]]:
    """One page of a List method, and the token of the next; reads and encodes no more items than needed.

    Items are sorted by `key`, whose values are unique, descending if `descending`. `items` may be a function that returns
    those after a key ("" for all). The interceptor binds a page token to its filter and order.

    Raises InvalidArgumentError: filter, order_by, page_size or page_token is invalid.
    """
    keep, ordered = compile_filter(request.filter, of), bool(request.order_by.strip())
    order = compile_order(request.order_by, of)
    most, last = page_limit(request.page_size), last_key(request.page_token)
    try:
        seen = tuple(SortValue(value, down) for value, down in json.loads(last or "[]"))
    except (ValueError, TypeError):
        raise forged_token() from None
    after = "" if ordered or not seen else seen[0].value
    if not isinstance(after, str):
        raise forged_token()

    def last_rank(item: Item) -> SortValue:
        return SortValue(key(item), descending)

    if callable(items):
        beyond: Iterable[Item] = items(after)
    else:
        beyond = items[bisect_right(items, SortValue(after, descending), key=last_rank) if after else 0 :]
    found: list[tuple[tuple[SortValue, ...], M]] = []
    end: tuple[SortValue, ...] | None = None  # no page goes so far
    for nth, item in enumerate(beyond, 1):
        message = encode(item)
        if keep(message):
            place = (*order(message), last_rank(item))
            try:
                if not ordered or (seen < place and (end is None or place < end)):
                    found.append((place, message))
            except TypeError:
                raise forged_token() from None
        if not ordered and len(found) > most:
            break
        if len(found) > 2 * most:
            found.sort(key=itemgetter(0))
            del found[most + 1 :]
            end = found[most][0]
        if nth % AT_ONCE == 0:
            yield
    found.sort(key=itemgetter(0))
    last_shown = found[most - 1][0] if len(found) > most else ()
    token = to_token(json.dumps([[rank.value, rank.down] for rank in last_shown])) if last_shown else ""
    return [message for _, message in found[:most]], token


def _at_once(steps: Callable[P, Generator[None, None, T]]) -> Callable[P, T]:
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        going = steps(*args, **kwargs)
        try:
            while True:
                next(going)
        except StopIteration as done:
            return cast("T", done.value)

    return run


listed = _at_once(_listing)
listed_in_turns = coroutine(_listing)
