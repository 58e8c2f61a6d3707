"""Rules of endpoints: columns."""

from gpuscale.api.autoscaler import v1 as api
from gpuscale.cli.console.cells import Column, View, duration, number, short, text


def _does(one: api.EndpointRule) -> str:
    """The kind of a rule with what it states, in the names of the contract."""
    from google.protobuf.json_format import MessageToDict

    kind = one.rule.WhichOneof("kind")
    if kind is None:
        return "-"
    stated = MessageToDict(getattr(one.rule, kind)).items()
    return f"{kind}: " + ", ".join(f"{name}={value}" for name, value in stated)


RULES = View[api.EndpointRule](
    "rules",
    (
        Column("NAME", lambda one: short(one.name)),
        Column("STATE", lambda one: "DISABLED" if one.rule.disabled else "ENABLED"),
        Column("PRIORITY", lambda one: str(one.rule.priority)),
        Column("SIGNAL", lambda one: text(one.rule.signal)),
        Column("COOLDOWN", lambda one: duration(one.rule, "cooldown")),
        Column("MIN", lambda one: number(one.rule, "min_replicas")),
        Column("MAX", lambda one: number(one.rule, "max_replicas")),
        Column("CHANGED", lambda one: duration(one, "since_change"), moving=True),
        Column("DOES", _does),
    ),
)
