"""The pages of the contract, a page a package, from the descriptor set that is shipped with it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib import resources

from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pb2 import FileDescriptorProto, MethodDescriptorProto, ServiceDescriptorProto

from gpuscale.api.types.v1 import options_pb2
from gpuscale.cli.views.contract_docs import FILE, Entry, describe

PREFIX = "gpuscale.api."
STATUS = re.compile(
    r"\b(?:INVALID_ARGUMENT|NOT_FOUND|ALREADY_EXISTS|FAILED_PRECONDITION|OUT_OF_RANGE|ABORTED|RESOURCE_EXHAUSTED"
    r"|PERMISSION_DENIED|UNAUTHENTICATED|UNAVAILABLE|DEADLINE_EXCEEDED|UNIMPLEMENTED)\b"
)
HEAD = """# The contract: {title}

Written by `make docs` from the .proto files in [../../protos](../../protos). Every method may also answer `INVALID_ARGUMENT` (a
field breaks its bounds), `UNAUTHENTICATED`, `PERMISSION_DENIED`, `DEADLINE_EXCEEDED` and `UNAVAILABLE`:
[../errors.md](../errors.md). Texts have at most 1,024 characters and lists at most 1,000 items where no other bound stands.
"""
INDEX = """# The contract

Written by `make docs`. gRPC, protobuf 3; how clients begin: [../client.md](../client.md#other-languages). Roles include those
before them: viewer, agent, operator, admin ([../security.md](../security.md)).

| service | method | least role | what it does |
| --- | --- | --- | --- |
"""
_SERVICE, _METHOD = 6, 2  # numbers of the fields that paths to comments consist of


def pages() -> Mapping[str, str]:
    """Each page by its name: an index, and one of each package."""
    files = _files()
    packages = sorted({file.package for file in files})
    found = {
        _page_name(package): _page(package, [file for file in files if file.package == package])
        for package in packages
    }
    return {"api.md": f"{INDEX}{''.join(_index(files))}\n## Roles\n\n{roles()}\n", **found}


def roles() -> str:
    """The table of roles: what each is for, and the methods that need it and no more."""
    allowed: dict[str, list[str]] = {}
    for _, service, _ in _services(_files("gpuscale.")):
        for role in {_role(method) for method in service.method}:
            named = ", ".join(method.name for method in service.method if _role(method) == role)
            allowed.setdefault(role, []).append(f"{service.name}: {named}")
    rows = ["| role | what it is for | methods |", "| --- | --- | --- |"]
    for one in describe("types.v1.Role", "").parts:
        role = one.name.removeprefix("ROLE_").lower()
        if role in allowed:
            rows.append(f"| {role} | {_cell(one.text)} | {'<br>'.join(sorted(allowed[role]))} |")
    return "\n".join(rows)


def _files(prefix: str = PREFIX) -> list[FileDescriptorProto]:
    data = resources.files("gpuscale.api").joinpath(FILE).read_bytes()
    files = descriptor_pb2.FileDescriptorSet.FromString(data).file
    return [file for file in files if file.package.startswith(prefix)]


def _page_name(package: str) -> str:
    return f"api-{package.removeprefix(PREFIX).partition('.')[0]}.md"


def _index(files: list[FileDescriptorProto]) -> Iterator[str]:
    for file, service, said in _services(files):
        page = f"{_page_name(file.package)}#{service.name.lower()}"
        for nth, method in enumerate(service.method):
            first = said.get((nth,), "").partition(". ")[0].rstrip(".")
            yield f"| [{service.name}]({page}) | {method.name} | {_role(method)} | {_cell(first)} |\n"


def _services(
    files: list[FileDescriptorProto],
) -> Iterator[tuple[FileDescriptorProto, ServiceDescriptorProto, Mapping[tuple[int, ...], str]]]:
    """Each service with its comments: of itself under (), of a method under its number."""
    for file in files:
        said = {tuple(one.path): _plain(one.leading_comments) for one in file.source_code_info.location}
        for index, service in enumerate(file.service):
            comments = {
                (nth,): said.get((_SERVICE, index, _METHOD, nth), "") for nth in range(len(service.method))
            }
            yield file, service, comments | {(): said.get((_SERVICE, index), "")}


def _page(package: str, files: list[FileDescriptorProto]) -> str:
    parts = [HEAD.format(title=package)]
    for _, service, said in _services(files):
        parts.append(f"## {service.name}\n\n{said[()]}\n\n| method | takes | returns | least role | what |")
        parts.append("| --- | --- | --- | --- | --- |")
        parts += [_method(one, said[nth,]) for nth, one in enumerate(service.method)]
        parts.append("")
    for file in sorted(files, key=lambda one: one.name):
        names = sorted([one.name for one in file.message_type] + [one.name for one in file.enum_type])
        for name in names:
            parts += _type(f"{package.removeprefix(PREFIX)}.{name}", file, name)
    return "\n".join(parts)


def _method(method: MethodDescriptorProto, said: str) -> str:
    takes = ("stream " if method.client_streaming else "") + method.input_type.rpartition(".")[2]
    gives = ("stream " if method.server_streaming else "") + method.output_type.rpartition(".")[2]
    text = STATUS.sub(lambda found: f"`{found[0]}`", _cell(said))
    return f"| {method.name} | {takes} | {gives} | {_role(method)} | {text} |"


def _role(method: MethodDescriptorProto) -> str:
    role = method.options.Extensions[options_pb2.method].role
    return options_pb2.Role.Name(role).removeprefix("ROLE_").lower() if role else "-"


def _type(name: str, file: FileDescriptorProto, short: str) -> Iterator[str]:
    """A message or an enum, and those that stand in it."""
    entry = describe(name, "")
    yield f"### {name.split('.', 2)[2]}\n\n{entry.text}\n"
    yield from _parts(entry)
    message = next((one for one in file.message_type if one.name == short), None)
    if message is not None and "." not in name.split(".", 2)[2]:
        nested = [one.name for one in message.nested_type if not one.options.map_entry]
        for one in sorted(nested + [one.name for one in message.enum_type]):
            yield from _type(f"{name}.{one}", file, short)


def _parts(entry: Entry) -> Iterator[str]:
    """The table of fields, or of values."""
    if not entry.parts:
        return
    if entry.parts[0].type:
        yield "| field | type | what | bounds |\n| --- | --- | --- | --- |"
        yield from (
            f"| `{one.name}` | {_cell(one.type)} | {_cell(one.text)} | {_cell(one.bounds)} |"
            for one in entry.parts
        )
    else:
        yield "| value | what |\n| --- | --- |"
        yield from (f"| `{one.name}` | {_cell(one.text)} |" for one in entry.parts)
    yield ""


def _plain(comment: str) -> str:
    return " ".join(comment.split())


def _cell(text: str) -> str:
    """Text that stands in a table: no bar, and no tag of HTML."""
    return text.replace("|", "\\|").replace("<", "&lt;")
