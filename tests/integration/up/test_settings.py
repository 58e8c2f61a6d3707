"""`up` reads every setting of every part that it does not refuse."""

import logging
from collections import defaultdict
from pathlib import Path
from uuid import uuid4

import pytest

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.common.config.sources import Settings
from gpuscale.common.errors import InvalidArgumentError
from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.security.certificate_authority import make_authority
from gpuscale.up.app import open_all
from gpuscale.up.settings import load_all

FILE = '[agent]\nmetrics_listen = "127.0.0.1:0"\n[fleet]\nmetrics_listen = "127.0.0.1:0"\n'


def refused(part: type[Settings], name: str, folder: Path) -> bool:
    path = folder / "refused.toml"
    path.write_text(f'[{part.section}]\n{name} = "1"\n')
    try:
        load_all(["--config", str(path)])
    except (InvalidArgumentError, SystemExit) as error:
        return "is not used here" in str(error)
    return False


async def test_what_is_not_refused_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_authority("test").write(tmp_path, "ca")
    (tmp_path / "c.toml").write_text(f'{FILE}authority_dir = "{tmp_path}"\n')
    flags = f"--config={tmp_path}/c.toml --data-dir={tmp_path}/data --listen=127.0.0.1:0 --simulate=1".split()
    settings = load_all(flags)
    level = logging.getLogger().level
    read: defaultdict[type[Settings], set[str]] = defaultdict(set)
    plain = Settings.__getattribute__

    def noting(one: Settings, name: str) -> object:
        read[type(one)].add(name)
        return plain(one, name)

    with monkeypatch.context() as patch:
        patch.setattr(Settings, "__getattribute__", noting)
        async with open_all(settings) as running, open_channel(running.address) as channel:
            ask = allocator_api.Ask(gpu_count=1)
            request = allocator_api.ReserveRequest(request_id=str(uuid4()), holder="h", ask=ask)
            await allocator_api.AllocatorServiceStub(channel).Reserve(request)
    assert logging.getLogger().level == level, (
        "what is quiet at the end is not so for the rest of the process"
    )
    parts = (settings.agent, settings.fleet, settings.allocator, settings.autoscaler, settings.adapter)
    unread = [
        (type(one), name) for one in parts for name in type(one).model_fields if name not in read[type(one)]
    ]
    assert unread
    monkeypatch.setattr("gpuscale.common.config.sources.load", lambda *_, **__: settings.up)
    ignored = [f"[{part.section}] {name}" for part, name in unread if not refused(part, name, tmp_path)]
    assert ignored == []
