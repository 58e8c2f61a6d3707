"""Kinds of resources and their names, and words of a command line that is not yet parsed. Pure.

`endpoints`, `endpoint` and `ep` are one kind, and a name can say its own: `delete endpoints/jobs` is `delete endpoint jobs`.
Names may be complete, as `endpoints/jobs/replicas/r1`, have any noun, as `ep/jobs`, or none, as `jobs/r1`.
"""

import re
from collections.abc import Container, Sequence
from typing import NamedTuple

from gpuscale.common import names
from gpuscale.common.errors import InvalidArgumentError


class Noun(NamedTuple):
    """The message of a kind of resource, below the package, and its names."""

    message: str
    plural: str
    singular: str
    short: str
    other: str = ""


NOUNS = (
    Noun("monitor.v1.Node", "nodes", "node", "no"),
    Noun("types.v1.Gpu", "gpus", "gpu", "gpu"),
    Noun("monitor.v1.NodeProcess", "processes", "process", "ps"),
    Noun("allocator.v1.Reservation", "reservations", "reservation", "rsv", "res"),
    Noun("allocator.v1.Job", "jobs", "job", "job"),
    Noun("autoscaler.v1.Endpoint", "endpoints", "endpoint", "ep"),
    Noun("autoscaler.v1.Replica", "replicas", "replica", "rep"),
    Noun("autoscaler.v1.Rule", "rules", "rule", "rule"),
    Noun("autoscaler.v1.QueueWatcher", "watchers", "watcher", "qw"),
    Noun("autoscaler.v1.Decision", "decisions", "decision", "dec"),
    Noun("autoscaler.v1.Adapter", "adapters", "adapter", "ad"),
    Noun("monitor.v1.Recording", "recordings", "recording", "rec"),
    Noun("allocator.v1.Cordon", "cordons", "cordon", "cor"),
    Noun("autoscaler.v1.ReportedMetric", "metrics", "metric", "met"),
    Noun("allocator.v1.Quota", "quotas", "quota", "quo"),
    Noun("allocator.v1.Booking", "bookings", "booking", "bk"),
    Noun("autoscaler.v1.Backtest", "backtests", "backtest", "bt"),
    Noun("allocator.v1.UsePolicy", "policies", "policy", "pol"),
    Noun("allocator.v1.PolicyAct", "acts", "act", "policy-act", "policy-acts"),
    Noun("allocator.v1.NotificationTarget", "targets", "target", "nt", "notification-target"),
    Noun("allocator.v1.PowerBudget", "budgets", "budget", "pb", "power-budget"),
    Noun("allocator.v1.PowerChange", "changes", "change", "power-change", "power-changes"),
    Noun("allocator.v1.Notification", "notifications", "notification", "msg"),
    Noun("monitor.v1.HealthEvent", "healthEvents", "healthEvent", "health"),
)
_BY_NAME = {name: noun for noun in NOUNS for name in noun[1:] if name}


def plural(noun: str) -> str:
    """The plural of any name of a noun; other words unchanged."""
    return _BY_NAME[noun].plural if noun in _BY_NAME else noun


def with_noun(words: Sequence[str], known: Container[str]) -> list[str]:
    """The words after a verb, beginning with the `known` name of their noun.

    `ep jobs` becomes `endpoints jobs`, `endpoints/jobs` becomes `endpoints endpoints/jobs`; other words are unchanged.
    """
    if not words:
        return []
    typed, *rest = words
    collection, *name = (typed.split("/")[-2], typed) if "/" in typed else (typed,)
    if names.cordoned(typed) != typed:
        collection = "cordons"
    found = next((one for one in _BY_NAME.get(collection, ()) if one in known), None)
    return [typed, *rest] if found is None else [found, *name, *rest]


def is_field(words: Sequence[str]) -> bool:
    """Whether `explain` with these words is about the contract: a path of fields, or a kind without a name."""
    if not words or words[0].startswith("-") or "/" in words[0]:
        return False
    first, others = words[0], [word for word in words[1:] if word != "--recursive"]
    return "." in first or first[:1].isupper() or (not others and first in _BY_NAME)


def format_of(arguments: Sequence[str]) -> str:
    """The value of `-o`, or empty, found before parsing so that parse errors can be JSON too."""
    found = ""
    left = iter(arguments)
    for argument in left:
        if argument == "--":
            break
        if argument in {"-o", "--output"}:
            found = next(left, "")
        elif argument.startswith("--output="):
            found = argument.removeprefix("--output=")
        elif argument.startswith("-o"):
            found = argument[2:].removeprefix("=")
    return found


_UUID = r"[A-Za-z]+-[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}"


def full_name(pattern: str, typed: str) -> str:
    """The full resource name of what was typed. Raises InvalidArgumentError: it does not fit the pattern."""
    in_full = canonical(typed)
    if names.match(pattern, in_full) is not None:
        return in_full
    collections, ids = pattern.split("/")[::2], typed.split("/")
    name = "/".join(part for pair in zip(collections, ids, strict=False) for part in pair)
    if len(collections) != len(ids) or names.match(pattern, name) is None:
        short = "/".join(pattern.split("/")[1::2]).replace("{", "").replace("}", "").upper()
        raise InvalidArgumentError(f"{typed!r} is not a valid name; write {short} or {pattern}")
    return name


def tenant_of(typed: str) -> str:
    """The tenant: `vision` of `quotas/vision` or `quo/vision`."""
    return canonical(typed).removeprefix("quotas/")


def canonical(typed: str) -> str:
    """A name with plural nouns, `endpoints/jobs` of `ep/jobs`; unchanged if it does not begin with a noun."""
    parts = typed.split("/")
    if len(parts) % 2:
        return typed
    return "/".join(part if index % 2 else plural(part) for index, part in enumerate(parts))


def without_noun(typed: Sequence[str], *nouns: str) -> tuple[str, list[str]]:
    """Split the words of `node host-1` or `host-1` into one of the plural `nouns`, or empty, and the names."""
    noun = plural(typed[0]) if len(typed) > 1 else ""
    return (noun, list(typed[1:])) if noun in nouns else ("", list(typed))


def is_uuid(typed: str) -> bool:
    """Whether it looks like a GPU's UUID, such as GPU-6afcb721-67c0-5d87-a657-b17ffccbb12a."""
    return re.fullmatch(_UUID, typed) is not None
