"""`gpuscalectl init`: what it writes on a first host is what the services take, and a second run takes nothing away."""

import tomllib
from pathlib import Path

from cryptography import x509

from gpuscale.allocator.settings import AllocatorSettings
from gpuscale.common.security.auth import Role, TokenFile
from gpuscale.common.security.authority import subject_of
from tests.support.cli import run_cli


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_first_host_is_set_up_once(tmp_path: Path) -> None:
    folder, url = tmp_path / "gpuscale", tmp_path / "url"
    url.write_text("postgresql://u:secret@db/gpuscale")
    typed = ("init", "--dir", str(folder), "--host", "gpus.example", "--database-file", str(url))
    planned = run_cli(*typed, "--plan")
    assert (planned.code, folder.exists()) == (0, False)
    made = run_cli(*typed)
    assert made.code == 0, made.err
    written = (folder / "gpuscale.toml").read_text()
    assert planned.out == f"# {folder / 'gpuscale.toml'}\n{written}"
    secret = (folder / "admin.token").read_text().strip()
    assert secret not in made.out + made.err + written
    tokens = TokenFile(folder / "tokens.toml")
    assert tokens.principal(secret).role is Role.ADMIN
    assert tokens.limits_of_certificate("services").tenants == ("*",)
    assert AllocatorSettings.model_validate(tomllib.loads(written)["allocator"]).database is not None
    server = x509.load_pem_x509_certificate((folder / "pki" / "server.crt").read_bytes())
    assert subject_of(server).hosts == ("gpus.example", "localhost", "127.0.0.1")
    private = [folder / "admin.token", folder / "tokens.toml", *(folder / "pki").glob("*.key")]
    assert {oct(path.stat().st_mode & 0o777) for path in private} == {"0o600"}
    before = content(folder)
    assert run_cli(*typed).code == 0
    other = run_cli(*typed, "--host", "other", "--dir", str(folder), "--database-file", "elsewhere")
    assert (other.code, "with other settings" in other.err) == (4, True)
    assert content(folder) == before
