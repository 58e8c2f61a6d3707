"""The guard of the contract, in a repository of its own: tools/check_breaking.py as `make check` runs it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorSet

ROOT = Path(__file__).parents[2]
TOOL = "tools/check_breaking.py"
DECLARED = "Change\n\nBreaks-Contract: b was never read\n"


class Repository:
    """A contract with one message, whose fields the test says."""

    def __init__(self, folder: Path, package: str = "gpuscale.api.v1") -> None:
        self.folder, self._package = folder, package
        for name in (TOOL, "protos/buf.yaml", "pyproject.toml"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        self._git("init", "-q")
        self.write("a", "b")
        self.commit("Begin")

    def write(self, *fields: str) -> None:
        described = FileDescriptorSet()
        name = f"{self._package.replace('.', '/')}/a.proto"
        file = described.file.add(name=name, package=self._package)
        file.syntax = "proto3"
        message = file.message_type.add(name="M")
        for name in fields:
            one = message.field.add(name=name, number=ord(name), label=FieldDescriptorProto.LABEL_OPTIONAL)
            one.type = FieldDescriptorProto.TYPE_STRING
        path = self.folder / "protos/gpuscale/api/contract.binpb"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(described.SerializeToString())

    def commit(self, message: str, *arguments: str) -> None:
        self._git("add", ".")
        who = ("-c", "user.name=ann", "-c", "user.email=ann@localhost")
        self._git(*who, "commit", "-qm", message, *arguments)

    def said(self) -> str:
        """What the guard has against it; empty where nothing."""
        tool = subprocess.run(
            [sys.executable, TOOL], cwd=self.folder, capture_output=True, text=True, timeout=60
        )
        assert bool(tool.returncode) == bool(tool.stderr), tool.stderr
        return tool.stderr

    def release(self, version: str) -> None:
        (self.folder / "pyproject.toml").write_text(f'[project]\nversion = "{version}"\n')

    def _git(self, *arguments: str) -> None:
        subprocess.run(["git", *arguments], cwd=self.folder, check=True, capture_output=True, timeout=60)


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def test_what_is_added_breaks_nothing_and_is_guarded_from_then_on(repository: Repository) -> None:
    repository.write("a", "b", "c")
    repository.commit("Add c")
    assert not repository.said()
    repository.write("a", "b")
    assert 'field "99" with name "c"' in repository.said(), "before it is committed"
    repository.commit("Take c away")
    (repository.folder / "README").touch()
    repository.commit("Do something else")
    assert 'field "99" with name "c"' in repository.said(), "and behind later commits"


def test_a_break_is_declared_by_its_commit_and_after_1_0_not_at_all(repository: Repository) -> None:
    repository.write("a")
    repository.commit(DECLARED)
    assert not repository.said()
    repository.release("1.0.0")
    assert 'field "98" with name "b"' in repository.said()


def test_what_is_internal_may_break_later_too(tmp_path: Path) -> None:
    repository = Repository(tmp_path, package="gpuscale.internal.v1")
    repository.release("1.2.0")
    repository.write("a")
    repository.commit("Change")
    assert "gpuscale/internal/v1/a.proto" in repository.said()
    repository.commit(DECLARED, "--amend")
    assert not repository.said()
