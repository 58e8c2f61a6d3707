"""`preset`, `evaluate`, `backtest`, `tune` and `explain` against an autoscaler that runs."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml

from gpuscale.common.runtime.tasks import SystemClock
from tests.support.asking_autoscaler import Asking, asking
from tests.support.autoscaler_app import FakeWatchers
from tests.support.cli import Ran, run_cli
from tests.support.waiting import eventually

TRACE = "arrival_seconds,service_seconds\n" + "".join(f"{second},4\n" for second in range(300))
LOAD = ("--slots", "2", "--slo", "5s", "--cold-start", "10s..60s", "--max-gpus", "8")


@pytest.fixture
async def asked(tmp_path: Path) -> AsyncIterator[Asking]:
    async with asking(tmp_path / "data", FakeWatchers(SystemClock())) as found:
        yield found


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "requests.csv"
    path.write_text(TRACE)
    return str(path)


async def ctl(asked: Asking, *arguments: str, stdin: str = "") -> str:
    ran: Ran = await asyncio.to_thread(
        run_cli, "--address", asked.autoscaler.address, *arguments, stdin=stdin
    )
    assert ran.code == 0, ran.err
    return ran.out


async def test_a_preset_is_shown_applied_asked_about_and_explained(asked: Asking) -> None:
    asked.autoscaler.watchers.queues["jobs"] = (60, 0)
    shown = await ctl(
        asked, "preset", "show", "scaling=vanilla", "--watcher", "jobs", "--max", "3", "--gpus", "0"
    )
    assert "upAbove: 10" in shown
    assert "created" in await ctl(asked, "apply", "-f", "-", stdin=shown)
    await eventually(asked.autoscaler.history)
    found = await ctl(asked, "evaluate", "endpoint", "jobs", "--before", "3", "--signal", "all=31@1s")
    assert "3 -> 3 wanted, limited by CLAMPED_TO_MAX" in found
    assert "would be 4 if max_replicas were not 3" in found
    down = await ctl(
        asked, "evaluate", "endpoint", "jobs", "--before", "3", "--signal", "all=2", "-o", "json"
    )
    assert json.loads(down)["decision"]["wanted"] == 2
    missing = await ctl(asked, "evaluate", "endpoints/jobs", "--signal", "all=?")
    assert "SIGNAL_MISSING" in missing
    asked_by_file = await ctl(asked, "evaluate", "endpoint", "-f", "-", "--signal", "all=1", stdin=shown)
    assert "1 -> 1 wanted" in asked_by_file
    explained = await ctl(asked, "explain", "endpoint", "jobs")
    assert "evaluated now: " in explained
    verified = await ctl(asked, "explain", "endpoint", "jobs", "--verify")
    assert verified.splitlines()[-1].startswith("verified: ")
    assert len(explained.splitlines()) <= 24


async def test_a_backtest_compares_files_and_presets(asked: Asking, trace: str, tmp_path: Path) -> None:
    policies = tmp_path / "policies.yaml"
    policies.write_text(
        "kind: Policy\nname: quick\npreset: {preset: hpa, parameters: {stabilization_window_seconds: 30}}\n"
        "---\nkind: Endpoint\nname: two\nspec: {minReplicas: 2, maxReplicas: 2}\n"
    )
    arguments = ("backtest", "-f", str(policies), "--preset", "keda", "--trace", trace, *LOAD)
    found = await ctl(asked, *arguments)
    assert [line.split()[0] for line in found.splitlines()] == ["POLICY", "quick", "two", "keda", "work"]
    data = json.loads(await ctl(asked, *arguments, "-o", "json"))
    assert [one["name"] for one in data["reports"]] == ["quick", "two", "keda"]
    every = await ctl(asked, "backtest", "--preset", "all", "--trace", trace, *LOAD, "-o", "name")
    assert {"gpuscale", "opengris_no", "ray_serve"} <= set(every.split())


async def test_a_backtest_is_left_to_the_server_looked_at_stopped_and_deleted(
    asked: Asking, trace: str
) -> None:
    begun = await ctl(asked, "backtest", "-d", "--preset", "hpa", "--trace", trace, *LOAD, "-o", "name")
    name = begun.strip().rpartition("/")[2]
    assert await ctl(asked, "stop", "backtest", name, "-o", "name") == begun
    table = await ctl(asked, "get", "backtests", "--no-headers")
    assert table.split()[0] == name
    shown = await ctl(asked, "get", "backtest", name)
    assert "work alone: " in shown
    assert json.loads(await ctl(asked, "get", "backtest", name, "-o", "json"))["name"] == f"backtests/{name}"
    await ctl(asked, "delete", "backtest", name, "--yes")
    assert name not in await ctl(asked, "get", "backtests")
    attached = await ctl(asked, "backtest", "--preset", "hpa", "--trace", trace, *LOAD)
    assert "hpa" in attached
    assert "SUCCEEDED" in await ctl(asked, "get", "backtests")


async def test_tune_writes_a_policy_that_can_be_applied(asked: Asking, trace: str, tmp_path: Path) -> None:
    written = tmp_path / "policy.yaml"
    begun = await ctl(asked, "tune", "-d", "--trace", trace, *LOAD, "--gpus", "0", "-o", "name")
    arguments = ("tune", "--of", begun.strip(), "--goal", "late<=20%", "--write", str(written))
    data = json.loads(await ctl(asked, *arguments, "-o", "json"))
    front = data["pareto"]
    assert data["chosen"] in [one["name"] for one in front]
    hours = [one["gpuHours"] for one in front]
    assert hours == sorted(hours)
    assert data["goal"] == "late<=20%"
    assert data["why"].startswith(f"{data['chosen']}: the cheapest that meets late<=20%")
    assert 0 <= data["judged"]["violationPercent"] <= 100
    assert "created" in await ctl(asked, "apply", "-f", str(written))


async def test_an_endpoint_is_tuned_by_a_goal_and_keeps_what_is_no_policy(
    asked: Asking, trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuscale.client.tuning.grid", lambda *_: {})  # tried by the test before
    asked.autoscaler.watchers.queues["work"] = (0, 0)
    shown = await ctl(asked, "preset", "show", "keda", "--watcher", "work", "--name", "jobs", "--gpus", "0")
    manifest = yaml.safe_load(shown)
    manifest["spec"] |= {"maxReplicas": 5, "warmSpares": 1}
    await ctl(asked, "apply", "-f", "-", stdin=yaml.safe_dump(manifest))
    written = tmp_path / "policy.yaml"
    arguments = ("tune", "jobs", "--trace", trace, *LOAD, "--goal", "late:30s", "--write", str(written))
    found = (await ctl(asked, *arguments)).splitlines()
    rows = [line[:2] for line in found[1:-2]]
    assert found[0].split()[:4] == ["POLICY", "LATE", "AT-MOST", "GPU-HOURS"]
    assert rows.count("* ") == 1
    assert any(line.startswith("  as it is ") for line in found), "so that it is seen what would be saved"
    assert "cost least; chosen on 9 of 10 windows and judged on the other: " in found[-1]
    policy = yaml.safe_load(written.read_text())
    assert (policy["name"], policy["spec"]["maxReplicas"], policy["spec"]["warmSpares"]) == ("jobs", 5, 1)
    assert policy["spec"]["rules"] != manifest["spec"]["rules"]
    assert "work" in str(policy["spec"]["signals"])
    assert "configured" in await ctl(asked, "apply", "-f", str(written))


async def test_rules_are_created_changed_and_deleted_one_by_one(asked: Asking) -> None:
    shown = await ctl(asked, "preset", "show", "scaling=vanilla", "--watcher", "jobs", "--gpus", "0")
    await ctl(asked, "apply", "-f", "-", stdin=shown)
    parts = ("signal=all", "step.comparator=>", "step.threshold=90", "step.step=2", "cooldown=60s")
    await ctl(asked, "create", "rule", "jobs/big", *(f"--set={one}" for one in parts))
    table = await ctl(asked, "get", "rules", "-e", "jobs")
    assert [line.split()[:2] for line in table.splitlines()[1:]] == [
        ["jobs/big", "ENABLED"],
        ["jobs/ratio", "ENABLED"],
    ]
    assert "step: comparator=GREATER_THAN, threshold=90.0, step=2" in table
    changes = ("--set", "step.threshold=0", "--set", "minReplicas=0", "--clear", "cooldown", "--disable")
    await ctl(asked, "update", "rule", "jobs/big", *changes)
    one = json.loads(await ctl(asked, "get", "rules", "jobs/big", "-o", "json"))["rule"]
    assert (one["step"]["threshold"], one["minReplicas"], one["disabled"]) == (0.0, 0, True)
    assert "cooldown" not in one
    await ctl(asked, "update", "rule", "jobs/big", "--set", "threshold.upAbove=50")
    other = json.loads(await ctl(asked, "get", "rules", "--disabled", "-o", "json"))["rules"]
    assert [one["rule"]["threshold"]["upAbove"] for one in other] == [50.0]
    await ctl(asked, "delete", "rule", "jobs/big", "--yes")
    assert "jobs/big" not in await ctl(asked, "get", "rules")


async def test_tiers_are_typed_with_a_preset(asked: Asking) -> None:
    shown = await ctl(
        asked,
        *("preset", "show", "opengris_fixed_elastic", "--watcher", "jobs", "--gpus", "0"),
        *("--tier", "primary", "--tier", "elastic=5", "--set", "primary_worker_groups=2"),
    )
    tiers = yaml.safe_load(shown)["spec"]["template"]["tiers"]
    assert tiers == [
        {"adapter": "adapters/primary", "maxReplicas": 2},
        {"adapter": "adapters/elastic", "maxReplicas": 5},
    ]
    assert "created" in await ctl(asked, "apply", "-f", "-", stdin=shown)


async def test_policies_share_gpus_and_have_traces_of_their_own(asked: Asking, trace: str) -> None:
    arguments = ("backtest", "--preset", "hpa", "--preset", "knative", "--trace", trace, *LOAD)
    alone = json.loads(await ctl(asked, *arguments, "-o", "json"))["reports"]
    shared = json.loads(
        await ctl(asked, *arguments, "--share-gpus", "--trace-of", f"knative={trace}", "-o", "json")
    )["reports"]
    waits = [sum(one["waitP99Seconds"] for one in reports) for reports in (alone, shared)]
    assert waits[1] > waits[0], "they are in each other's way"
    history = await asyncio.to_thread(
        run_cli, "--address", asked.autoscaler.address, "backtest", "--preset", "hpa", "--history", "nobody"
    )
    assert "endpoints/nobody" in history.err


async def test_a_preset_makes_capability_sets_and_a_person_scales_one(asked: Asking, tmp_path: Path) -> None:
    await ctl(asked, "apply", "-f", str(Path(__file__).parents[3] / "examples" / "capabilities.yaml"))
    preset = ("preset", "show", "scaling=capability", "--template", "w", "--min", "0", "--name", "made")
    sets = ("--capability-set", "cpu:cpu=1", "--capability-set", "big:gpu=2,high_memory", "-o", "json")
    (manifest := tmp_path / "made.json").write_text(await ctl(asked, *preset, *sets))
    made = json.loads(manifest.read_text())["spec"]["capabilitySets"]
    amounts = [{"cpu": "1"}, {"gpu": "2", "high_memory": "-1"}]
    assert [(one["id"], one["capabilities"]) for one in made] == [*zip(("cpu", "big"), amounts, strict=True)]
    assert [one["template"].get("gpuCount", 0) for one in made] == [0, 2]
    await ctl(asked, "apply", "-f", str(manifest))
    scale = ("scale", "endpoint", "made", "--replicas", "1")
    with pytest.raises(AssertionError, match="capability"):
        await ctl(asked, *scale)
    await ctl(asked, *scale, "--capability-set", "big")
    with pytest.raises(AssertionError, match="write it like big:gpu=2,high_memory"):
        await ctl(asked, "preset", "show", "scaling=capability", "--capability-set", "gpu=2")
