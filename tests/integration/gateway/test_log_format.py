"""A program whose log is JSON writes nothing else to standard error."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from gpuscale.common.rpc.status import REQUEST_ID_KEY
from tests.support.certificates import Authority
from tests.support.ports import free_port
from tests.support.waiting import eventually_sync

METHOD = "/gpuscale.api.allocator.v1.AllocatorService/ListReservations"


def test_every_line_of_standard_error_is_json(tmp_path: Path) -> None:
    """Also of handshakes that fail, of upstreams that are away, and of a second program at the address."""
    tls, port = Authority(tmp_path).server(), free_port()
    flags = f"--log-format json --listen 127.0.0.1:{port} --tls-cert-file {tls.cert_file} --tls-key-file {tls.key_file}"
    for name in ("fleet", "allocator", "autoscaler"):
        flags += f" --{name}-address 127.0.0.1:{free_port()}"
    script = Path(sys.executable).with_name("gpuscale-gateway")
    program = [sys.executable, "-X", "dev", script, *flags.split()]
    environment = {name: one for name, one in os.environ.items() if not name.startswith(("GPU", "GRPC"))}
    with (
        (tmp_path / "err").open("wb") as errors,
        subprocess.Popen(program, stderr=errors, env=environment) as first,
    ):
        try:
            told = lambda: (tmp_path / "err").read_text()  # noqa: E731
            eventually_sync(lambda: "serving" in told())
            secure = grpc.ssl_channel_credentials((tmp_path / "ca.pem").read_bytes())
            strange = grpc.ssl_channel_credentials(Authority(tmp_path, "other").file.read_bytes())
            for channel, called in (
                (grpc.insecure_channel(f"127.0.0.1:{port}"), False),
                (grpc.secure_channel(f"127.0.0.1:{port}", strange), False),
                (grpc.secure_channel(f"127.0.0.1:{port}", secure), True),
            ):
                with channel, pytest.raises(grpc.RpcError) as caught:
                    channel.unary_unary(METHOD)(b"", timeout=60, metadata=(("x-request-id", "r-1"),))
                assert isinstance(caught.value, grpc.Call)
                trailing = dict(caught.value.trailing_metadata() or ())
                assert (trailing.get(REQUEST_ID_KEY) == "r-1") is called
            again = subprocess.run(program, stderr=errors, env=environment, timeout=60, check=False)
            assert again.returncode == 1
        finally:
            first.send_signal(signal.SIGTERM)
    lines = [json.loads(line) for line in told().splitlines()]
    assert any("another program listens" in str(line.get("error")) for line in lines)
    assert [line for line in lines if line.get("request_id") == "r-1"], "the call whose upstream is away"
