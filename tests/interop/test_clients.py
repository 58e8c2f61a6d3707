"""Clients of other languages, as examples/clients has them, generated from the contract and run against a real server."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.support.certificates import Authority
from tests.support.fixtures import need
from tests.support.tokens import token, write_tokens
from tests.support.up import Up

ROOT = Path(__file__).parents[2]
PROTOS, EXAMPLES = ROOT / "protos", ROOT / "examples" / "clients"
CONTRACT = PROTOS / "gpuscale" / "api" / "contract.binpb"
SECONDS = 500
pytestmark = pytest.mark.timeout(900)  # packages are fetched and C++ is built
GO_PLUGINS = {"protoc-gen-go": "protoc-gen-go", "protoc-gen-go-grpc": "protoc-gen-go-grpc"}
CPP = {
    "g++": "g++",
    "make": "make",
    "protoc": "protobuf-compiler",
    "grpc_cpp_plugin": "protobuf-compiler-grpc",
}
INVALID_ARGUMENT, FAILED_PRECONDITION = "3", "9"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A server on loopback that asks nobody who they are."""
    with Up(tmp_path_factory.mktemp("plain"), simulate=1) as up:
        yield up


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Up, Mapping[str, str]]]:
    """A server with TLS that wants tokens, and what tells a client of both."""
    folder = tmp_path_factory.mktemp("guarded")
    authority, tokens = Authority(folder), write_tokens(folder / "tokens.toml", ann="operator")
    tls = authority.server()
    (folder / "ann.token").write_text(token("ann"))
    said = ("--tls-cert-file", tls.cert_file, "--tls-key-file", tls.key_file, "--tokens-file", tokens)
    with Up(folder, simulate=1, arguments=[str(word) for word in said]) as up:
        files = {"GPUSCALE_CA_FILE": authority.file, "GPUSCALE_TOKEN_FILE": folder / "ann.token"}
        yield up, {name: str(path) for name, path in files.items()}


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Sequence[str]:
    """The example for Node: a client in TypeScript, by grpc-js."""
    need(missing({"node": "nodejs", "npm": "npm"}))
    folder = example("node", tmp_path_factory.mktemp("clients"))
    run(folder, "npm", "install", "--no-audit", "--no-fund", "--no-package-lock")
    run(folder, "buf", "generate", str(CONTRACT), "--path", "gpuscale/api/allocator")
    run(folder, "node_modules/.bin/tsc")
    return ("node", str(folder / "out" / "reserve.js"))


@pytest.fixture(scope="session")
def cpp(tmp_path_factory: pytest.TempPathFactory) -> Sequence[str]:
    """The example in C++, by Debian's gRPC."""
    need(missing(CPP))
    folder = example("cpp", tmp_path_factory.mktemp("clients"))
    run(folder, "make", "-j2", f"CONTRACT={CONTRACT}")
    return (str(folder / "reserve"),)


@pytest.mark.parametrize("language", ["node", "cpp"])
def test_a_generated_client_reserves_renews_releases_and_reads_errors(
    language: str, plain: Up, request: pytest.FixtureRequest
) -> None:
    said = told(request.getfixturevalue(language), plain.address)
    name, gpu = said["reserved"]
    assert gpu.startswith("SIM-")
    assert said["repeated"] == [name], "the same request_id is granted the same"
    assert 0 < int(said["renewed"][0]) <= 300
    assert said["released"] == [name]
    assert said["refused"][0] == FAILED_PRECONDITION
    if language == "node":  # the other one watches nothing, and reads no details
        assert said["refused"][1:] == ["RESERVATION_ENDED"]
        assert said["watched"] == [name]
        assert said["mistaken"] == [INVALID_ARGUMENT, "request_id"]
    else:
        assert said["refused"][1:] == ["with", "details"]


@pytest.mark.parametrize("language", ["node", "cpp"])
def test_it_shows_a_token_over_tls(
    language: str, guarded: tuple[Up, Mapping[str, str]], request: pytest.FixtureRequest
) -> None:
    program, (up, files) = request.getfixturevalue(language), guarded
    assert told(program, up.address, files)["released"]
    without = [files | {name: os.devnull} for name in files]
    for one in without:
        assert subprocess.run(
            [*program, up.address], env={**os.environ, **one}, capture_output=True, timeout=60
        ).returncode


def test_every_file_suits_the_generators_of_other_languages(tmp_path: Path) -> None:
    """Go wants to be told where each file belongs; C++, Java and C# take what the package says."""
    need(missing(GO_PLUGINS | {"protoc": "protobuf-compiler"}))
    template = (PROTOS / "buf.gen.yaml").read_text()
    for language in ("cpp", "java", "csharp"):
        template += f"  - protoc_builtin: {language}\n    out: {language}\n    exclude_types: *annotations\n"
    (tmp_path / "buf.gen.yaml").write_text(template)
    run(tmp_path, "buf", "generate", str(CONTRACT), "--path", "gpuscale/api")
    found = (path.relative_to(PROTOS).with_suffix("") for path in PROTOS.rglob("*.proto"))
    files = [path for path in found if path.parts[1] == "api"]
    assert files
    for file in files:
        written = tmp_path / "gen" / file.with_suffix(".pb.go")
        assert f"\npackage {file.parts[-3]}{file.parts[-2]}\n" in written.read_text()
        assert (tmp_path / "cpp" / file.with_suffix(".pb.h")).is_file()
    assert (tmp_path / "java/io/gpuscale/api/allocator/v1/Ask.java").is_file()
    assert "namespace Gpuscale.Api.Allocator.V1" in (tmp_path / "csharp/Ask.cs").read_text()
    page = (ROOT / "docs" / "api.md").read_text()
    for language, named in {
        "java": r"\b([sg]et[A-Z]\w*)\(",
        "csharp": r"(?:\.|[{,] )([A-Z]\w+)(?= =|[ ;,)])",
    }.items():
        code = "".join(path.read_text() for path in (tmp_path / language).rglob("*.*") if path.is_file())
        shown = set(re.findall(named, page.split(f"```{language}\n")[1].split("```")[0]))
        assert len(shown) >= 6
        assert {name for name in shown if not re.search(rf"\b{name}\b", code)} == set(), language


def missing(programs: Mapping[str, str]) -> str | None:
    """Which of these programs is not here, with its Debian package; None where all are."""
    absent = [package for program, package in programs.items() if shutil.which(program) is None]
    return f"not installed: {', '.join(absent)} (tools/install_test_servers.sh)" if absent else None


def example(language: str, folder: Path) -> Path:
    """A copy of an example, to be built there."""
    kept = shutil.ignore_patterns("node_modules", "gen", "out", "*.o")
    return Path(shutil.copytree(EXAMPLES / language, folder / language, ignore=kept))


def run(folder: Path, *command: str) -> str:
    """Run a command in a folder, with buf of this environment on the path; what it wrote. It must end well."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command, cwd=folder, env=os.environ | {"PATH": path}, capture_output=True, text=True, timeout=SECONDS
    )
    assert not done.returncode, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def told(
    program: Sequence[str], address: str, files: Mapping[str, str] | None = None
) -> dict[str, list[str]]:
    """What a client says of its calls: the words of each line by the first of them."""
    done = subprocess.run(
        [*program, address], env={**os.environ, **(files or {})}, capture_output=True, text=True, timeout=60
    )
    assert not done.returncode, done.stderr
    return {words[0]: words[1:] for words in map(str.split, done.stdout.splitlines())}
