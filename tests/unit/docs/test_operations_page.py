"""What docs/operations.md says that people see is what the programs say."""

import re

import pytest

from tests.unit.docs.pages import ROOT, SERVICES, read, rows

OF_OTHERS = {"Connection refused", "Domain name not found", "database is locked"}
"""Words of gRPC, of its TLS, and of SQLite."""
SEEN = sorted(
    {text for cells in rows(read("operations.md")) for text in re.findall(r"`([^`]+)`", cells[0])} - OF_OTHERS
)


@pytest.fixture(scope="module")
def source() -> str:
    """The text of all programs, with strings that go over several lines in one piece."""
    text = "\n".join(path.read_text() for path in SERVICES.rglob("*.py"))
    return re.sub(r'"\s*\n\s*f?"', "", text)


@pytest.mark.parametrize("text", SEEN)
def test_every_message_of_the_page_is_one_of_a_program(text: str, source: str) -> None:
    fixed = re.split(r"HOST:PORT|\.\.\.|\b[A-Z]\b|\ballocator\b|, |: ", text)
    pieces = [piece.strip() for piece in fixed if piece.strip() and piece not in OF_OTHERS]
    assert pieces
    assert [piece for piece in pieces if piece not in source] == []


def test_every_alert_leads_to_its_first_look() -> None:
    rules = (ROOT / "deploy" / "prometheus" / "rules.yml").read_text()
    alerts = re.findall(r"- alert: (\w+)", rules)
    assert (
        rules.count('\n          runbook: docs/operations.md#alerts\n          first_look: "')
        == len(alerts)
        > 40
    )
    assert "\n## Alerts\n" in read("operations.md")
    looks = {cells[0].strip("`"): cells[-1] for cells in rows(read("reference/alerts.md"))}
    assert set(alerts) < looks.keys()
    assert all(looks.values())
