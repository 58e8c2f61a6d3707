"""A secret in every place that takes one shows up nowhere else: no log, error, answer, process list, nor any file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from gpuscale.common.security.auth import TokenFile
from tests.support.certificates import Authority
from tests.support.cli import Ran, run_cli
from tests.support.ports import free_port
from tests.support.up import Up, ctl_environment
from tests.support.waiting import eventually_sync

CANARY = f"c4n4ry-{uuid4().hex}"
"""In every secret; no command line of another test that runs at the same time has it."""
WATCHER = """\
kind: QueueWatcher
name: jobs
spec: {broker: one, queue: jobs}
---
kind: QueueWatcher
name: more
spec: {broker: two, queue: jobs}
---
kind: Endpoint
name: jobs
spec:
  min_replicas: 1
  max_replicas: 2
  template: {template: sleeper, gpu_count: 1}
  signals:
    - {id: load, prometheus: {server: main, query: up}}
  rules:
    - {id: up, signal: load, step: {comparator: COMPARATOR_GREATER_THAN, threshold: 1, step: 1}}
"""


def configuration(folder: Path) -> str:
    """A configuration with a secret wherever one may stand."""
    nobody = f"127.0.0.1:{free_port()}"
    token = folder / "prometheus.token"
    token.write_text(f"{CANARY}-prometheus-token")
    token.chmod(0o600)
    return f"""
[brokers.one]
amqp_url = "amqp://user-{CANARY}:amqp-{CANARY}@{nobody}"
management_url = "http://user-{CANARY}:management-{CANARY}@{nobody}"

[prometheus.main]
url = "http://user-{CANARY}:prometheus-{CANARY}@{nobody}"

[prometheus.other]
url = "http://{nobody}"
token_file = "{token}"

[templates.sleeper]
command = ["/bin/sleep", "600"]
env = {{SECRET = "template-{CANARY}"}}
pass_env = ["WORKER_SECRET"]
"""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[Up, Path]]:
    """`up` with TLS, tokens, an audit log, its whole log, and secrets in the file and in the environment."""
    config, tokens, token = tmp_path / "config.toml", tmp_path / "tokens.toml", tmp_path / "token"
    config.write_text(configuration(tmp_path))
    config.chmod(0o600)
    authority = Authority(tmp_path)
    tls = authority.server()
    made = run_cli("token", "create", "boss", "--role", "admin", "--tokens-file", str(tokens))
    token.write_text(made.out)
    environment = ctl_environment(
        GPUSCALE_BROKER_TWO_AMQP_URL=f"amqp://user:environment-{CANARY}@127.0.0.1:{free_port()}",
        WORKER_SECRET=f"worker-{CANARY}",
    )
    arguments = ["--config", str(config), "--tokens-file", str(tokens), "--log-level", "debug"]
    arguments += ["--tls-cert-file", str(tls.cert_file), "--tls-key-file", str(tls.key_file)]
    arguments += ["--audit-file", str(tmp_path / "audit.jsonl")]
    with Up(tmp_path, simulate=2, arguments=arguments, environment=environment, typed=True) as up:
        yield up, tmp_path


def ctl(up: Up, folder: Path, *arguments: str, token: str = "token") -> Ran:
    options = ["--address", up.address, "--ca-file", str(folder / "ca.pem"), "--request-timeout", "60s"]
    return run_cli(*options, "--token-file", str(folder / token), *arguments)


def process_list() -> dict[str, str]:
    """The command line of every process that may be read."""
    return {
        f"cmdline of {one.pid}": " ".join(one.info["cmdline"] or ())
        for one in psutil.process_iter(["cmdline"])
    }


def environments(*pids: int) -> dict[str, str]:
    """The environments that the kernel shows of processes."""
    return {
        f"environ of {pid}": Path(f"/proc/{pid}/environ").read_bytes().decode("utf-8", "replace")
        for pid in pids
    }


def replicas(up: Up) -> list[int]:
    """The workers of this server; other tests may run such programs too."""
    children = psutil.Process(up.process.pid).children(recursive=True)
    return [one.pid for one in children if one.cmdline() == ["/bin/sleep", "600"]]


def leaks(found: dict[str, str], *secrets: str) -> list[str]:
    return sorted(place for place, text in found.items() if any(secret in text for secret in secrets))


def files(folder: Path) -> dict[str, str]:
    """Every file below a folder, as text in which a secret would be seen."""
    return {
        str(path.relative_to(folder)): path.read_bytes().decode("latin-1")
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_secret_shows_up_nowhere_but_where_it_was_given(site: tuple[Up, Path]) -> None:
    up, folder = site
    secret = (folder / "token").read_text().strip()
    assert TokenFile(folder / "tokens.toml").principal(secret).name == "boss"
    manifest = folder / "manifest.yaml"
    manifest.write_text(WATCHER)
    (folder / "wrong.token").write_text(f"wrong-{CANARY}")
    ran = {"apply": ctl(up, folder, "apply", "-f", str(manifest))}
    assert ran["apply"].code == 0, ran["apply"].err
    for noun in ("nodes", "watchers", "endpoints", "replicas", "decisions", "adapters", "reservations"):
        ran[noun] = ctl(up, folder, "get", noun, "-o", "json", "-v")
        assert ran[noun].code == 0, ran[noun].err
    ran["explain"] = ctl(up, folder, "explain", "endpoint", "jobs")
    ran["wrong token"] = ctl(up, folder, "get", "nodes", "-v", token="wrong.token")
    assert ran["wrong token"].code == 8
    ran["audit"] = eventually_sync(
        lambda: (
            (told := ctl(up, folder, "get", "audit", "-o", "json")) and "UNAUTHENTICATED" in told.out and told
        )
    )
    said = {name: one.out + one.err for name, one in ran.items()} | {"banner": up.banner}
    assert leaks(said, CANARY, secret) == []
    workers = eventually_sync(lambda: replicas(up), retry_on=(psutil.NoSuchProcess,))
    assert leaks(environments(up.process.pid), CANARY) == []
    assert any("WORKER_SECRET" in text for text in environments(*workers).values()), "handed on"
    processes = process_list()
    assert any(str(folder) in text for text in processes.values()), "the process list shows this server"
    assert leaks(processes, CANARY, secret) == []
    up.stop()
    given = {"config.toml", "prometheus.token", "token", "wrong.token"}
    assert set(leaks(files(folder), CANARY, secret)) == given
    key = (folder / "server.key").read_text().splitlines()[1]
    assert leaks(files(folder), key) == ["server.key"]
    noted = [json.loads(line)["result"] for line in (folder / "audit.jsonl").read_text().splitlines()]
    assert {"OK", "UNAUTHENTICATED"} <= set(noted)
