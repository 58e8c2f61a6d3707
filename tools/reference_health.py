"""The reference page of health: how long what each check finds must last, and what each XID means."""

from __future__ import annotations

from gpuscale.monitor.health.checks import HOLDS
from gpuscale.monitor.health.events import XIDS

HEAD = """# Every health check and XID

Written by `make docs` from the code. [Monitoring](../monitoring.md#health) says what becomes of them.

## Checks

| check | an event after | resolved after |
| --- | --- | --- |
"""
XID_HEAD = """
## XIDs

Others are a WARNING, with CONTACT_SUPPORT.

| number | what | severity | action | fatal |
| --- | --- | --- | --- | --- |
"""


def page() -> str:
    """The text of the page."""
    checks = (
        f"| {check.name} | {_seconds(one.raise_after)} | {_seconds(one.resolve_after)} |\n"
        for check, one in HOLDS.items()
    )
    xids = (
        f"| {number} | {one.name} | {one.severity.name} | {one.action.name} | {'yes' if one.fatal else ''} |\n"
        for number, one in XIDS.items()
    )
    return HEAD + "".join(checks) + XID_HEAD + "".join(xids)


def _seconds(time: float) -> str:
    return f"{time:g} s" if time else "at once"
