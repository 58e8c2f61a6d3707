"""Two GPU hosts and one without: `run` and the client's leases use GPUs of the host they are on, or say what to type."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from tests.fault.hosts.lan import why_unavailable
from tests.fault.hosts.site import LEFT, RIGHT, SERVICES, Site, typing_on_hosts
from tests.support.nvml_double import why_unavailable as why_no_double

ONE_GPU = ("run", "--gpus", "1", "--max-utilization", "100")
SHOW = ("--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES $(readlink /proc/self/ns/net)")
NETWORK = "import os; print(os.readlink('/proc/self/ns/net'))"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    reason = why_unavailable() or why_no_double()
    if reason is not None:
        pytest.skip(reason)
    with typing_on_hosts(tmp_path_factory.mktemp("hosts")) as running:
        yield running


def granted(site: Site) -> int:
    """How many grants there were so far, by the fence of the next."""
    ran = site.ctl(SERVICES, "reserve", "--gpus", "1", "--max-utilization", "100", "-o", "json")
    assert ran.code == 0, ran.err
    made = json.loads(ran.out)
    site.ctl(SERVICES, "release", made["name"])
    return int(made["fence"])


@pytest.mark.parametrize("host", [LEFT, RIGHT])
def test_a_command_gets_gpus_of_the_host_it_is_typed_on(site: Site, host: str) -> None:
    """The two share a kernel, so their network namespaces tell them apart."""
    own = site.run(host, sys.executable, "-c", NETWORK).out.strip()
    ran = site.ctl(host, *ONE_GPU, *SHOW)
    assert ran.code == 0, ran.err
    uuid, network = ran.out.split()
    assert (uuid.startswith(f"GPU-{host}-"), network) == (True, own)
    assert site.listed("reservations") == []


def test_nothing_is_held_where_ssh_does_not_reach_the_host_that_was_granted(
    site: Site, tmp_path: Path
) -> None:
    for more, code, says in (
        (("--node", RIGHT), 7, f"no supervisor came up on {RIGHT}"),
        (("--gpu", f"{RIGHT}/gpu-right-0"), 7, f"no supervisor came up on {RIGHT}"),
        (("--exclude-node", LEFT), 7, f"no supervisor came up on {RIGHT}"),
        (("--members", "2", "--strategy", "strict-spread"), 7, f"no supervisor came up on {RIGHT}"),
    ):
        ran = site.ctl(LEFT, *ONE_GPU, *more, "--", "touch", str(tmp_path / "ran"))
        assert (ran.code, ran.out, says in ran.err) == (code, "", True), ran.err
        assert site.listed("reservations") == []
    assert not (tmp_path / "ran").exists()


def test_a_refusal_says_that_only_this_host_was_asked(site: Site) -> None:
    ran = site.ctl(LEFT, "run", "--gpus", "3", *SHOW)
    assert ran.code != 0
    assert f"only this host, {LEFT}, was asked" in ran.err


def test_a_host_that_cannot_be_told_is_not_guessed(site: Site) -> None:
    """The third host shares the kernel with both and has an agent of neither: its commands go over ssh."""
    ran = site.ctl(SERVICES, *ONE_GPU, *SHOW)
    assert (ran.code, ran.out) == (7, "")
    assert "no supervisor came up on" in ran.err


def test_who_may_not_reserve_is_told_so(site: Site) -> None:
    ran = site.ctl(LEFT, *ONE_GPU, *SHOW, token="viewer")
    assert (ran.code != 0, ran.out) == (True, "")
    assert "role" in ran.err
    elsewhere = site.ctl(LEFT, *ONE_GPU, "--node", RIGHT, *SHOW, token="viewer")
    assert (elsewhere.code != 0, "role" in elsewhere.err) == (True, True)


def test_leases_of_a_program_are_of_its_host_unless_it_says_otherwise(site: Site) -> None:
    program = dedent(
        """
        import asyncio, json
        from gpuscale.client import FailedPreconditionError, connect, connect_async

        ANY = {"max_utilization_percent": 100}

        def told(read):
            try:
                return read()
            except FailedPreconditionError as error:
                return f"{error.reason}: {error.message}"

        async def loop():
            async with connect_async() as client:
                async with client.reserve(**ANY) as lease:
                    own = lease.env({})["CUDA_VISIBLE_DEVICES"]
                async with client.reserve(nodes=["nodes/right"], **ANY) as lease:
                    return own, told(lambda: lease.env({})), lease.env({}, node="right")["CUDA_VISIBLE_DEVICES"]

        found = {}
        with connect() as client:
            with client.reserve(**ANY) as lease:
                found["own"] = lease.cuda_visible_devices
            with client.reserve(nodes=["nodes/right"], **ANY) as lease:
                found["env"], found["cuda"] = told(lease.env), told(lambda: lease.cuda_visible_devices)
                found["uuids"], found["there"] = lease.gpu_uuids, lease.env({}, node="right")["CUDA_VISIBLE_DEVICES"]
            with client.reserve(anywhere=True, member_count=2, gang_strategy="strict_spread", **ANY) as lease:
                found["spread"], found["part"] = told(lease.env), lease.env({}, node="left")["CUDA_VISIBLE_DEVICES"]
        found["loop"] = asyncio.run(loop())
        print(json.dumps(found))
        """
    )
    ran = site.run(LEFT, sys.executable, "-c", program)
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    for refused in (found["env"], found["cuda"], found["spread"], found["loop"][1]):
        assert refused.startswith("GPUS_ELSEWHERE: "), found
        assert f"holds GPUs of {RIGHT}, and this host is {LEFT}" in refused
        assert f'lease.env(node="{RIGHT}")' in refused
    assert found["own"].startswith(f"GPU-{LEFT}-")
    assert found["loop"][0].startswith(f"GPU-{LEFT}-")
    assert found["part"].startswith(f"GPU-{LEFT}-")
    assert found["uuids"] == [found["there"]]
    assert found["there"].startswith(f"GPU-{RIGHT}-")
    assert found["loop"][2].startswith(f"GPU-{RIGHT}-")
    assert site.listed("reservations") == []


RELAYED = """
    import sys, grpc
    from gpuscale.api.allocator import v1 as api
    from gpuscale.client import connect
    from gpuscale.client.asks import reserve_request
    with connect() as client:
        granted = client.allocator.Reserve(reserve_request(1, "a", {"max_utilization_percent": 100}))
    one, renew = granted.reservation, api.RenewReservationRequest
    with grpc.insecure_channel("unix:" + sys.argv[1]) as channel:
        stub = api.AllocatorServiceStub(channel)
        for token in (granted.lease_token, "another", ""):
            shown = (("gpuscale-lease-token", token),) if token else ()
            try:
                stub.RenewReservation(renew(name=one.name, fence=one.fence), metadata=shown, timeout=10)
                print("OK")
            except grpc.RpcError as error:
                print(error.code().name)
        shown = (("gpuscale-lease-token", granted.lease_token),)
        stub.ReleaseReservation(api.ReleaseReservationRequest(name=one.name, fence=one.fence), metadata=shown, timeout=10)
"""


def test_an_agent_passes_on_what_a_lease_token_may_ask(site: Site) -> None:
    """The services want client certificates, and whoever asks the agent's socket has none."""
    ran = site.run(LEFT, sys.executable, "-c", dedent(RELAYED), str(site.hosts.folder / f"{LEFT}.sock"))
    assert ran.out.split() == ["OK", "PERMISSION_DENIED", "PERMISSION_DENIED"], ran.err
    assert site.listed("reservations") == []
