"""Use policies on a real allocator, its time moved by the test: who is noted, told and sent away, and who never is."""

import asyncio
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import trustme

from gpuscale.allocator.state.policies import PolicyStore
from gpuscale.allocator.usecases import notifying, policing
from gpuscale.api.allocator import v1 as api
from gpuscale.common.errors import GpuscaleError
from gpuscale.common.rpc.status import rpc_errors
from tests.support import policies
from tests.support.allocator import Client, Reservation, running
from tests.support.clock import ManualClock
from tests.support.fake_fleet import FakeFleet, gpu_message, node_message
from tests.support.policies import NOTE, NOTIFY, REVOKE, Admin, idle_policy
from tests.support.ports import free_port
from tests.support.waiting import calls_of, eventually
from tests.support.webhook import webhook

SHORT = 0.01
STAGES = [
    api.PolicyStage(after={"seconds": 600}, actions=[NOTE]),
    api.PolicyStage(after={"seconds": 1200}, actions=[REVOKE], grace={"seconds": 600}),
]
"""Of a policy that acts after ten minutes and after twenty: each minute is looked at."""


@pytest.fixture(autouse=True)
def looked_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policing, "LOOK", SHORT)
    monkeypatch.setattr(notifying, "LOOK", SHORT)
    monkeypatch.setattr(notifying, "FIRST_WAIT", SHORT)


@asynccontextmanager
async def lab(
    data_dir: Path,
    fleet: FakeFleet,
    clock: ManualClock,
    allowed: tuple[str, ...] = ("127.0.0.0/8",),
    ca_file: Path | None = None,
) -> AsyncGenerator[tuple[Client, Admin]]:
    """A running allocator that may notify on loopback."""
    settings = {"notify_networks": allowed, "notify_ca_file": ca_file}
    async with running(data_dir, fleet, clock=clock, **settings) as client:
        yield client, Admin(client.channel, clock)


async def test_a_restart_begins_no_time_anew_and_repeats_nothing(tmp_path: Path) -> None:
    clock, fleet = ManualClock(), FakeFleet(node_message("n0", count=1))
    async with lab(tmp_path, fleet, clock) as (client, admin):
        one = await client.reserve(1, ttl=86_400)
        await admin.put(idle_policy(stages=STAGES))
        await eventually(lambda: _followed(admin, one.name))
        await admin.pass_time(11)
        await eventually(lambda: policies.noted(client, one))
        await admin.pass_time(5)
    clock.advance(300)  # of this nobody knows anything
    async with lab(tmp_path, fleet, clock) as (client, admin):
        (standing,) = await eventually(lambda: _followed(admin, one.name))
        assert (standing.done_count, standing.held.seconds // 60) == (1, 16)
        assert (await eventually(lambda: policies.noted(client, one))).notes
        await admin.pass_time(5)
        await eventually(lambda: policies.revoked(client, one))
        assert [act.stage for act in await admin.acts()] == [2, 1]


async def test_a_look_that_finds_nothing_new_writes_nothing_and_others_once_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes, save_look = [], PolicyStore.save_look

    async def counted(self: PolicyStore, now: float, *rest: Any) -> None:
        writes.append(now)
        await save_look(self, now, *rest)

    monkeypatch.setattr(PolicyStore, "save_look", counted)
    clock, fleet = ManualClock(), FakeFleet(node_message("n0", count=8))
    async with lab(tmp_path, fleet, clock) as (client, admin):
        for _ in range(8):
            one = await client.reserve(1, ttl=86_400)
        await admin.put(idle_policy())
        await eventually(lambda: _followed(admin, one.name))
        assert len(writes) == 1, "eight that are seen for the first time, in one transaction"
        await admin.pass_time(10)
        assert len(writes) <= 11, "that was looked, once a minute"
        looks = calls_of(monkeypatch, policing.Policing, "look")
        await eventually(lambda: len(looks) > 10)
        assert len(writes) <= 11


async def test_whoever_begins_to_work_may_stay_and_a_shadow_does_nothing(tmp_path: Path) -> None:
    clock, fleet = ManualClock(), FakeFleet(node_message("n0", count=1))
    async with lab(tmp_path, fleet, clock) as (client, admin):
        one = await client.reserve(1, ttl=86_400)
        shadow = idle_policy(active=False, stages=STAGES)
        shadow.name = "policies/shadow"
        await admin.put(shadow)
        await admin.put(idle_policy(stages=STAGES))
        await eventually(lambda: _followed(admin, one.name))
        await admin.pass_time(21)
        await eventually(lambda: policies.revoked(client, one))
        fleet.put(node_message("n0", gpu_message("n0-0", utilization=80.0)))

        async def spared() -> Reservation | None:
            found = await client.get(one.name)
            return None if found.HasField("revoke_time") or found.notes else found

        assert (await eventually(spared)).end_reason == ""
        await eventually(lambda: _outcomes(admin, "idle", ["LIFTED", "DONE", "DONE"]))
        await eventually(lambda: _outcomes(admin, "shadow", ["SHADOW", "SHADOW"]))
        fleet.put(node_message("n0", gpu_message("n0-0", utilization=0.0)))
        await eventually(lambda: _followed(admin, one.name))
        await admin.pass_time(21)
        await eventually(lambda: policies.revoked(client, one))
        await admin.policies.DeleteUsePolicy(api.DeleteUsePolicyRequest(name="policies/idle"), timeout=60)
        await eventually(spared)


async def test_an_outsider_is_noticed_and_told_with_whoever_holds_the_gpu(tmp_path: Path) -> None:
    clock = ManualClock()
    fleet = FakeFleet(node_message("n0", count=2))
    async with webhook() as hook, lab(tmp_path, fleet, clock) as (client, admin):
        one = await client.reserve(1, ttl=86_400, gpus=["nodes/n0/gpus/n0-0"], holder="ann")
        await admin.target(hook.address)
        stage = api.PolicyStage(after={"seconds": 10}, actions=[NOTE, NOTIFY])
        spec = api.UsePolicySpec(
            condition=api.UseCondition.USE_CONDITION_OUTSIDER, stages=[stage], active=True
        )
        await admin.put(api.UsePolicy(name="policies/outsiders", spec=spec))
        gpus = [gpu_message(f"n0-{index}", index) for index in range(2)]
        gpus[0].reading.processes.add(pid=7, reservation=one.name)
        gpus[0].reading.processes.add(pid=8)
        gpus[1].reading.processes.add(pid=9)
        fleet.put(node_message("n0", *gpus))
        await eventually(lambda: admin.standings("policies/outsiders"), lambda found: len(found) == 2)
        clock.advance(20)  # what 30 s allow: the report of a process, a look, ten seconds, a look
        texts = await eventually(lambda: hook.texts("policy"), lambda found: found if len(found) > 1 else [])
        assert any("process 8 for" in text and "of ann" in text for text in texts)
        assert any("process 9 for" in text and "of ann" not in text for text in texts)
        assert "process 8" in (await eventually(lambda: policies.noted(client, one))).notes[0]


async def test_what_a_target_does_not_take_is_sent_again_and_then_a_dead_letter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifying, "MOST_ATTEMPTS", 3)
    fleet = FakeFleet(node_message("n0", count=1))
    async with webhook() as hook, lab(tmp_path, fleet, ManualClock()) as (client, admin):
        hook.status = 302  # a redirect is not followed
        made = await admin.target(hook.address)
        assert (made.host, made.signed, made.spec.url, made.spec.secret) == (hook.address[7:-5], True, "", "")
        await client.reserve(1)
        await admin.drain()
        (dead,) = await eventually(admin.letters, lambda found: [one for one in found if one.dead])
        assert (dead.attempt_count, dead.problem) == (3, "it answered 302")
        assert len({one["id"] for one in hook.events}) == 1


async def test_a_dry_run_of_what_is_not_on_record_is_refused(tmp_path: Path) -> None:
    wrong = "start_time must be before end_time, and both past"
    asked = [
        ("OUTSIDER", -7200, 0, "what OUTSIDER needs is not recorded"),
        ("IDLE", 0, -60, wrong),
        ("IDLE", -60, 3600, wrong),
        ("IDLE", -15 * 86_400, 0, "start_time must be within the last 14 days"),
    ]
    async with lab(tmp_path, FakeFleet(node_message("n0")), ManualClock()) as (_, admin):
        for condition, begin, end, problem in asked:
            stages = [api.PolicyStage(actions=[NOTE])]
            now = admin.clock.wall()
            request = api.DryRunUsePolicyRequest(
                use_policy=idle_policy(condition=f"USE_CONDITION_{condition}", stages=stages),
                start_time=now + timedelta(seconds=begin),
                end_time=now + timedelta(seconds=end),
            )
            with pytest.raises(GpuscaleError, match=problem), rpc_errors():
                await admin.policies.DryRunUsePolicy(request, timeout=60)


async def test_an_update_clears_what_its_mask_names_in_a_message_that_is_not_set(tmp_path: Path) -> None:
    async with lab(tmp_path, FakeFleet(node_message("n0")), ManualClock()) as (_, admin):
        made = await admin.put(idle_policy(scope={"models": ["H100"], "nodes": ["nodes/n0"]}))
        request = api.UpdateUsePolicyRequest(
            use_policy=idle_policy(), update_mask={"paths": ["spec.scope.models"]}
        )
        changed = (await admin.policies.UpdateUsePolicy(request, timeout=60)).use_policy
        made.spec.scope.ClearField("models")
        assert changed.spec == made.spec


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("https://localhost:{tls}", "localhost has no address that allocator.notify_networks allows"),
        ("https://127.0.0.1:{tls}", "its certificate is refused: unable to get local issuer certificate"),
        ("https://127.0.0.1:{mail}", "cannot be reached over TLS: wrong version number"),
        ("http://127.0.0.1:{mail}", "it gave no answer in HTTP"),
        ("http://127.0.0.1:{none}", "cannot be reached: Connection refused"),
    ],
)
async def test_why_a_target_is_not_reached_is_told(tmp_path: Path, url: str, problem: str) -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail\r\n\r\n")
        await reader.read()
        writer.close()

    mine = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(mine)
    fleet, allowed = FakeFleet(node_message("n0", count=1)), ("127.0.0.0/8",) if "127" in url else ()
    mail = await asyncio.start_server(greet, "127.0.0.1", 0)
    async with mail, webhook(mine) as hook, lab(tmp_path, fleet, ManualClock(), allowed) as (client, admin):
        tls, greets = urlsplit(hook.address).port, mail.sockets[0].getsockname()[1]
        await admin.target(url.format(tls=tls, mail=greets, none=free_port()))
        await client.reserve(1)
        await admin.drain()
        (letter,) = await eventually(admin.letters, lambda found: [one for one in found if one.problem])
        assert (letter.problem, hook.bodies) == (problem, [])


async def test_targets_of_a_lab_are_trusted_by_its_own_authority(tmp_path: Path) -> None:
    mine, authority = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), trustme.CA()
    authority.issue_cert("127.0.0.1").configure_cert(mine)
    trusted, fleet = tmp_path / "ca.crt", FakeFleet(node_message("n0", count=1))
    authority.cert_pem.write_to_path(trusted)
    async with webhook(mine) as hook, lab(tmp_path, fleet, ManualClock(), ca_file=trusted) as (client, admin):
        await admin.target(hook.address)
        await client.reserve(1)
        await admin.drain()
        assert await eventually(lambda: hook.texts("ending"))


async def _followed(admin: Admin, name: str) -> list[api.PolicyStanding]:
    return [one for one in await admin.standings() if one.subject == name]


async def _outcomes(admin: Admin, policy: str, wanted: list[str]) -> bool:
    acts = await admin.acts(filter=f'policy = "policies/{policy}"')
    return [api.PolicyAct.Outcome.Name(act.outcome).removeprefix("OUTCOME_") for act in acts] == wanted
