"""Settings: flags over environment over file over defaults, one line about whatever is unknown, and where state is kept."""

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar, Literal

import pytest
from pydantic import BaseModel, Field, SecretStr

from gpuscale.allocator.settings import AllocatorSettings
from gpuscale.autoscaler.settings import AutoscalerSettings
from gpuscale.common import VERSION
from gpuscale.common.config import settings as settings_module
from gpuscale.common.config.settings import DatabaseSettings, ServerSettings, UpstreamSettings
from gpuscale.common.config.sources import Settings, load, load_table, read_config
from gpuscale.common.errors import FailedPreconditionError, InvalidArgumentError
from gpuscale.common.secrets import SecretUrl
from gpuscale.common.security.tls import ServerTls


class Broker(Settings):
    section: ClassVar[str] = "brokers"
    amqp_url: SecretUrl
    prefetch: int = 1


class Limits(BaseModel):
    most: int = 1


class AgentSettings(ServerSettings, UpstreamSettings):
    section: ClassVar[str] = "agent"
    listen: str = "127.0.0.1:7071"
    fleet_address: str = ""
    source: Literal["nvml", "simulated", "auto"] = "auto"
    period_seconds: float = Field(1.0, gt=0, description="seconds between readings, 100% of them")
    data_dir: Path | None = None
    simulate: int | None = None
    state_dir: Path = Field(default_factory=lambda: Path("/worked/out"), description="what it keeps")
    labels: list[str] = Field(default_factory=list, description="labels of the node")
    key: SecretStr | None = None
    brokers: dict[str, Broker] = Field(default_factory=dict)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUSCALE_CONFIG", raising=False)


def load_agent(*argv: str) -> AgentSettings:
    return load(AgentSettings, argv, program="gpuscale-agent", description="Reads the GPUs of a host.")


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line that a start with these flags ends with."""
    with pytest.raises(SystemExit) as caught:
        load_agent(*argv)
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("gpuscale-agent: error: ")
    assert err.count("\n") == 1
    return err


def config(tmp_path: Path, text: str) -> str:
    path = tmp_path / "gpuscale.toml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    path.chmod(0o600)
    return str(path)


def test_flag_beats_environment_beats_file_beats_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_agent().period_seconds == 1.0
    file = config(tmp_path, "[agent]\nperiod_seconds = 2\n")
    assert load_agent("--config", file).period_seconds == 2.0
    monkeypatch.setenv("GPUSCALE_AGENT_PERIOD_SECONDS", "3")
    assert load_agent("--config", file).period_seconds == 3.0
    assert load_agent("--config", file, "--period-seconds", "4").period_seconds == 4.0


def test_the_file_may_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSCALE_CONFIG", config(tmp_path, "[agent]\nperiod_seconds = 2\n"))
    assert load_agent().period_seconds == 2.0


def test_every_kind_of_field_is_read_from_flags() -> None:
    flags = "--reflection --no-insecure-allow-remote --data-dir=d/e --simulate 4 --source simulated"
    settings = load_agent(*flags.split(), "--labels", "a", "--labels", "b")
    assert (settings.reflection, settings.insecure_allow_remote) == (True, False)
    assert (settings.data_dir, settings.simulate, settings.source) == (Path("d/e"), 4, "simulated")
    assert settings.labels == ["a", "b"]


def test_every_kind_of_field_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"REFLECTION": "true", "SIMULATE": "4", "LABELS": "a, b", "KEY": "canary"}.items():
        monkeypatch.setenv(f"GPUSCALE_AGENT_{name}", text)
    settings = load_agent()
    assert (settings.reflection, settings.simulate, settings.labels) == (True, 4, ["a", "b"])
    assert settings.key.get_secret_value() == "canary"


def test_mappings_come_from_tables_of_their_own(tmp_path: Path) -> None:
    file = config(tmp_path, '[agent]\n[brokers.default]\namqp_url = "amqp://u:canary@mq/"\n')
    broker = load_agent("--config", file).brokers["default"]
    assert broker.amqp_url.reveal() == "amqp://u:canary@mq/"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--period-secnds", "1"], "unknown flag --period-secnds (did you mean --period-seconds?)"),
        (["--period-sec=1"], "unknown flag --period-sec (did you mean --period-seconds?)"),
        (["--zzz"], "unknown flag --zzz\n"),
        (["extra"], "unknown flag extra"),
        (["--key", "canary"], "unknown flag --key"),
        (["--brokers", "x"], "unknown flag --brokers"),
        (["--period-seconds", "0"], "--period-seconds: Input should be greater than 0"),
        (["--period-seconds", "nan"], "--period-seconds: "),
        (["--period-seconds"], "--period-seconds: expected one argument"),
        (["--source", "cuda"], "--source: Input should be 'nvml', 'simulated' or 'auto'"),
        (["--fleet-address", "a:1,b"], "--fleet-address: the address 'b' has no port: write HOST:PORT"),
        (["--config", "missing.toml"], "cannot read missing.toml: No such file"),
        (["--tls-cert-file", "a.pem"], "tls_cert_file and tls_key_file go together"),
        (["--tls-client-ca-file", "a.pem"], "tls_client_ca_file needs tls_cert_file"),
        (["--cert-file", "a.pem", "--ca-file", "b.pem"], "cert_file and key_file go together"),
        (["--cert-file", "a.pem", "--key-file", "b.pem"], "cert_file needs ca_file"),
    ],
)
def test_wrong_flags_are_named(capsys: pytest.CaptureFixture[str], argv: list[str], said: str) -> None:
    assert said in refused(capsys, *argv)


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        (
            "GPUSCALE_AGENT_PEROID_SECONDS",
            "1",
            "GPUSCALE_AGENT_PEROID_SECONDS (did you mean GPUSCALE_AGENT_PERIOD_SECONDS?)",
        ),
        ("GPUSCALE_AGENT_BROKERS", "1", "unknown environment variable GPUSCALE_AGENT_BROKERS"),
        ("GPUSCALE_AGNET_SIMULATE", "1", "GPUSCALE_AGNET_SIMULATE (did you mean GPUSCALE_AGENT_SIMULATE?)"),
        ("GPUSCALE_AGENT_SIMULATE", "many", "GPUSCALE_AGENT_SIMULATE: Input should be a valid integer"),
    ],
)
def test_wrong_variables_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, variable: str, value: str, said: str
) -> None:
    monkeypatch.setenv(variable, value)
    assert said in refused(capsys)


def test_variables_of_other_programs_and_of_users_are_none_of_our_business(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("GPUSCALE_UP_DATA_DIR", "GPUSCALE_ADAPTER_LISTEN", "GPUSCALE_EXAMPLE_AMQP_URL"):
        monkeypatch.setenv(name, "x")
    assert load_agent() == AgentSettings()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[agent]\nperiod = 1\n", "unknown key period in [agent] (did you mean period_seconds?)"),
        ("[agent]\nsimulate = true\n[agnet]\n", "unknown table agnet (did you mean agent?)"),
        ("[agent]\nperiod_seconds = -1\n", "period_seconds in [agent]: Input should be greater than 0"),
        ("[agent]\nbrokers = {}\n", "unknown key brokers in [agent]"),
        ("[brokers.default]\nprefech = 1\namqp_url = 'amqp://mq'", "brokers.default.prefech: unknown key"),
        ("[brokers.default]\nprefetch = 1\n", "brokers.default.amqp_url: Field required"),
        ("agent = 1\n", "agent must be a table"),
        ("[agent\n", "is not TOML"),
        ("\x00", "is not TOML"),
        ("# \udce9", "is not TOML"),
    ],
)
def test_wrong_keys_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    assert said in refused(capsys, "--config", config(tmp_path, text))


def test_tables_of_other_programs_are_none_of_our_business(tmp_path: Path) -> None:
    file = config(tmp_path, '[fleet]\nunheard_of = 1\n[templates.worker]\ncommand = ["x"]\n')
    assert load_agent("--config", file) == AgentSettings()


@pytest.mark.parametrize(
    "text",
    [
        '[brokers.default]\namqp_url = "amqp://user:p@ss/canary@mq/"\n',
        '[brokers.default]\namqp_url = "canary"\n',
        '[brokers.default]\namqp_url = ["canary"]\n',
        '[agent]\nkey = ["canary"]\n',
    ],
)
def test_errors_never_show_a_value(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    assert "canary" not in refused(capsys, "--config", config(tmp_path, text))


def test_a_password_that_every_user_may_read_is_refused(tmp_path: Path) -> None:
    path = Path(config(tmp_path, '[brokers.default]\nurls = [{a = "amqp://user:canary@mq/"}]\n'))
    path.chmod(0o640)
    assert read_config(path)
    path.chmod(0o644)
    with pytest.raises(InvalidArgumentError, match="chmod o-r") as caught:
        read_config(path)
    assert "canary" not in caught.value.message
    path.write_text('[brokers.default]\namqp_url = "amqp://mq/"\n')
    assert read_config(path), "without a password all may read it"


def test_help_names_flags_variables_and_defaults_but_no_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load_agent("--help")
    assert caught.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for text in (
        "--period-seconds SECONDS",
        "100% of them (default: 1.0) [GPUSCALE_AGENT_PERIOD_SECONDS]",
        "--reflection, --no-reflection",
        "--labels ITEM labels of the node [GPUSCALE_AGENT_LABELS]",
        "what it keeps (default: /worked/out) [GPUSCALE_AGENT_STATE_DIR]",
        "--config FILE",
        "Reads the GPUs of a host.",
    ):
        assert text in shown
    assert "--key " not in shown


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load_agent("--version")
    assert (caught.value.code, capsys.readouterr().out.startswith("gpuscale-agent ")) == (0, True)


def test_load_table_takes_a_whole_file_and_overrides() -> None:
    table: Mapping[str, object] = {"agent": {"period_seconds": 2, "simulate": 3}, "fleet": {"x": 1}}
    environ = {"GPUSCALE_AGENT_SIMULATE": "5", "PATH": "/bin"}
    settings = load_table(AgentSettings, table, {"listen": "127.0.0.1:0"}, environ)
    assert (settings.period_seconds, settings.simulate, settings.listen) == (2.0, 5, "127.0.0.1:0")
    with pytest.raises(InvalidArgumentError, match="--listen"):
        load_table(AgentSettings, {}, {"listen": 5}, {})


def test_server_options_follow_the_settings(tmp_path: Path) -> None:
    plain = ServerSettings(listen="127.0.0.1:7", reflection=True).server_options()
    assert (plain.listen, plain.tls) == ("127.0.0.1:7", None)
    assert (plain.insecure_allow_remote, plain.reflection) == (False, True)
    files = (tmp_path / "c", tmp_path / "k", tmp_path / "a")
    settings = ServerSettings(
        tls_cert_file=files[0], tls_key_file=files[1], tls_client_ca_file=files[2], insecure_allow_remote=True
    )
    options = settings.server_options()
    assert (options.tls, options.insecure_allow_remote) == (ServerTls(*files), True)


def test_a_token_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "token"
    with pytest.raises(FailedPreconditionError, match="token") as caught:
        UpstreamSettings(token_file=missing).open_channel("127.0.0.1:1")
    assert caught.value.reason == "TOKEN_FILE"
    with pytest.raises(FailedPreconditionError):
        ServerSettings(tokens_file=missing).authenticator()


URL = "postgresql://gpuscale:secret-1234@db/gpuscale"


def allocator(database: object, environ: Mapping[str, str] | None = None) -> AllocatorSettings:
    return load_table(
        AllocatorSettings, {"allocator": {"data_dir": "d", "database": database}}, environ=environ or {}
    )


@pytest.mark.parametrize("kind", [AllocatorSettings, AutoscalerSettings])
def test_it_comes_from_the_environment_and_its_password_is_never_shown(kind: type[DatabaseSettings]) -> None:
    variable = f"GPUSCALE_{kind.section.upper()}_DATABASE"
    found = load_table(kind, {kind.section: {"data_dir": "d"}}, environ={variable: URL})
    assert found.database.reveal() == URL
    assert "secret" not in f"{found!r} {found} {found.database} {found.model_dump_json()}"


@pytest.mark.parametrize("kind", [AllocatorSettings, AutoscalerSettings])
def test_it_comes_from_a_file(kind: type[DatabaseSettings], tmp_path: Path) -> None:
    """As Docker and Kubernetes mount secrets: neither `docker inspect` nor the environment shows it."""
    file = tmp_path / "url"
    file.write_text(f"{URL}\n")
    found = load_table(kind, {kind.section: {"data_dir": "d", "database_file": str(file)}}, environ={})
    assert found.database.reveal() == URL
    assert "secret" not in f"{found!r} {found} {found.model_dump_json()}"
    variable = f"GPUSCALE_{kind.section.upper()}_DATABASE_FILE"
    assert load_table(kind, {kind.section: {"data_dir": "d"}}, environ={variable: str(file)}) == found


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot read database_file"),
        ("", "must look like"),
        ("mysql://u:secret-1234@h/d", "must begin with postgresql://"),
        ("secret-1234", "must look like"),
    ],
)
def test_a_file_without_one_is_refused_and_not_shown(text: str | None, says: str, tmp_path: Path) -> None:
    """It does not come to mean that the state is kept in a file of its own."""
    if text is not None:
        (tmp_path / "url").write_text(text)
    variable = {"GPUSCALE_ALLOCATOR_DATABASE_FILE": str(tmp_path / "url")}
    with pytest.raises(InvalidArgumentError, match=says) as caught:
        allocator("", variable)
    assert "secret-1234" not in caught.value.message


def test_there_is_one_of_the_two(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"database in \[allocator\]: cannot be combined with database_file"
    ):
        allocator(URL, {"GPUSCALE_ALLOCATOR_DATABASE_FILE": str(tmp_path)})
    assert allocator("").database is None, "an empty one is none"


@pytest.mark.parametrize(
    "wrong",
    ["sqlite:///x.db", "mysql://u:secret-1234@h/d", "secret-1234", "postgresql://u:a/secret-1234@h/d"],
)
def test_another_url_is_refused_and_not_shown(wrong: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        allocator(wrong)
    assert "database in [allocator]" in caught.value.message
    assert "secret-1234" not in caught.value.message


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"no {name}")

    monkeypatch.setattr(settings_module, "import_module", missing)
    with pytest.raises(FailedPreconditionError, match=r"gpuscale\[postgresql\]") as caught:
        allocator(URL).require_driver()
    assert caught.value.reason == "POSTGRESQL_NOT_INSTALLED"


def test_the_version_that_programs_tell_is_that_of_the_package() -> None:
    assert version("gpuscale") == VERSION
