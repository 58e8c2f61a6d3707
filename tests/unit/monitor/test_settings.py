"""Settings of the agent and the fleet."""

from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from typing import get_type_hints

import pytest
from pydantic import ValidationError

from gpuscale.common.config.sources import load_table
from gpuscale.monitor.app.frame import AgentFrame, by_name
from gpuscale.monitor.app.settings import AgentSettings
from gpuscale.monitor.helper import run_helper


@pytest.mark.parametrize(
    "wrong",
    [
        {"node": "Not An Id"},
        {"node": ""},
        {"source": "magic"},
        {"period_seconds": 0.01},
        {"labels": ["=value"]},
        {"labels": ["zone=a", "zone=b"]},
        {"labels": [f"name{number}=x" for number in range(65)]},
        {"period_seconds": float("nan")},
        {"simulated_gpu_count": -1},
        {"simulated_gpu_count": 1025},
        {"soft_deadline_seconds": 10.0, "hard_deadline_seconds": 10.0},
        {"killer_socket": "/run/k.sock"},
        *({f"{of}_socket": f"/{'x' * 107}"} for of in ("work", "power", "pod_resources")),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        AgentSettings.model_validate(wrong)


def test_flags_environment_and_file_reach_the_agent() -> None:
    settings = load_table(
        AgentSettings,
        {"agent": {"node": "from-file", "source": "simulated"}},
        {"period_seconds": "2"},
        environ={"GPUSCALE_AGENT_NODE": "from-environment"},
    )
    assert (settings.node, settings.source, settings.period_seconds) == ("from-environment", "simulated", 2.0)


def test_labels_are_names_with_values() -> None:
    settings = load_table(AgentSettings, {}, environ={"GPUSCALE_AGENT_LABELS": "zone=a, rack=7=left,spare"})
    assert by_name(settings.labels) == {"zone": "a", "rack": "7=left", "spare": ""}


def test_an_agent_that_runs_without_its_settings_has_all_their_fields() -> None:
    fields = {name: field.annotation for name, field in AgentSettings.model_fields.items()}
    assert get_type_hints(AgentFrame) | {"section": None} == fields | {"section": None}


@pytest.mark.parametrize(("name", "why"), [("a/s", "No such"), ("x" * 107, "too long"), ("", "a directory")])
def test_a_helper_says_why_it_cannot_listen(tmp_path: Path, name: str, why: str) -> None:
    given = Namespace(agent_user="0", socket=tmp_path / name)
    with pytest.raises(SystemExit, match=f"--socket: cannot listen on {given.socket}: .*{why}"):
        run_helper(given, nullcontext)
