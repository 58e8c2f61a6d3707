"""`gpuscalectl support-bundle`: one private file that tells enough, and no secret of whatever it is made of."""

import json
import stat
import tarfile
from pathlib import Path

import pytest

from gpuscale.testing import FakeServer
from tests.support.cli import run_cli
from tests.support.ports import free_port

SECRETS = {
    "database": "s3cret-of-the-database",
    "query": "s3cret-of-its-client-key",
    "broker": "s3cret%2Fof-the-broker",
    "decoded": "s3cret/of-the-broker",
    "token": "s3cret-of-the-token",
    "own": "s3cret-of-the-caller",
    "worker": "s3cret-of-the-worker",
    "key": "MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQg",
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "node.token").write_text(f"{SECRETS['token']}\n")
    (tmp_path / "server.key").write_text(
        f"-----BEGIN PRIVATE KEY-----\n{SECRETS['key']}\n-----END PRIVATE KEY-----\n"
    )
    nowhere = f"127.0.0.1:{free_port()}"
    file = tmp_path / "gpuscale.toml"
    file.write_text(
        f"""
[allocator]
data_dir = "{tmp_path}"
fleet_address = "{nowhere}"
database = "postgresql://me:{SECRETS["database"]}@{nowhere}/state?sslpassword={SECRETS["query"]}"
token_file = "{tmp_path}/node.token"
tls_cert_file = "{tmp_path}/server.crt"
tls_key_file = "{tmp_path}/server.key"
[autoscaler]
data_dir = "{tmp_path}"
[brokers.default]
amqp_url = "amqp://me:{SECRETS["broker"]}@{nowhere}"
[adapter]
data_dir = "{tmp_path}"
autoscaler_address = "{nowhere}"
[templates.worker]
command = ["/bin/worker", "--password={SECRETS["worker"]}"]
env = {{ PASSWORD = "{SECRETS["worker"]}" }}
"""
    )
    file.chmod(0o600)
    return file


def bundle(config: Path, address: str, *options: str) -> dict[str, str]:
    """What a bundle holds, by name."""
    target, own = config.parent / "bundle.tar.gz", config.parent / "own.token"
    own.write_text(SECRETS["own"])
    own.chmod(0o600)
    where = ("--address", address, "--token-file", str(own))
    ran = run_cli(*where, "support-bundle", "--config", str(config), "--write", str(target), *options)
    assert ran.code == 0, ran.err
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    found: dict[str, str] = {}
    with tarfile.open(target) as archive:
        for entry in archive:
            content = archive.extractfile(entry)
            assert content is not None
            assert entry.mode == 0o600
            found[entry.name.removeprefix("gpuscale-support/")] = content.read().decode()
    for kind, secret in SECRETS.items():
        for name, text in found.items():
            assert secret not in text, (kind, name)
        assert secret not in ran.out + ran.err
    return found


def test_it_tells_enough_and_no_secret(config: Path, tmp_path: Path) -> None:
    log = tmp_path / "allocator.log"
    said = "".join(f"a line with {secret} in it\n" for kind, secret in SECRETS.items() if kind != "worker")
    log.write_text(f"the first line\n{said}the last line\n")
    with FakeServer(gpus=2) as server:
        with server.connect() as client:
            client.reserve(gpus=1, ttl="1h")
        found = bundle(config, server.address, "--log", str(log), "--log", str(tmp_path / "none.log"))
    packages = json.loads(found["versions.json"])["packages"]
    assert "gpuscale" in packages
    assert any(one["state"] == "FAIL" for one in json.loads(found["doctor.json"]))
    settings = json.loads(found["settings.json"])
    assert settings["allocator"]["database"].endswith("/state")
    assert settings["adapter"]["templates"] == ["worker"]
    [node] = json.loads(found["server/nodes.json"])
    assert node["name"] == "nodes/node-0"
    assert len(json.loads(found["server/reservations.json"])) == 1
    assert found["logs/allocator.log"].startswith("the first line\na line with [struck out] in it\n")
    assert found["logs/allocator.log"].endswith("the last line\n")
    assert "cannot read" in found["logs/none.log.error"]


def test_a_server_that_is_away_leaves_the_rest(config: Path) -> None:
    found = bundle(config, f"127.0.0.1:{free_port()}")
    assert "nothing answers" in found["server/nodes.error"]
    assert {"versions.json", "doctor.json", "settings.json"} <= found.keys()
