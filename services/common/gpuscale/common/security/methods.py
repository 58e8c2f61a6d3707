"""What the contract says about each method: the role it needs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from google.protobuf import descriptor_pool

from gpuscale.api.types.v1 import options_pb2
from gpuscale.common.security.principal import Role

# Methods of others' contracts, which cannot bear our option. None: no caller is needed.
_FOREIGN: Final[Mapping[str, Role | None]] = {
    "/grpc.health.v1.Health/Check": None,
    "/grpc.health.v1.Health/List": None,
    "/grpc.health.v1.Health/Watch": None,
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": Role.VIEWER,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Role.VIEWER,
}


@dataclass(frozen=True, slots=True)
class MethodInfo:
    """One method.

    Attributes:
        path: `/package.Service/Method`.
        role: the least role that may call it; None where no caller is needed.
        ours: whether its messages bear the rules of our contract.
    """

    path: str
    role: Role | None
    ours: bool


def find_method(path: str) -> MethodInfo | None:
    """What is known about a method; None where no role is given for it, so that nobody may call it.

    A method of ours is found once its generated module has been imported, as every servicer does.
    """
    if path in _FOREIGN:
        return MethodInfo(path, _FOREIGN[path], ours=False)
    try:
        method = descriptor_pool.Default().FindMethodByName(path.removeprefix("/").replace("/", "."))
    except KeyError:
        return None
    role = method.GetOptions().Extensions[options_pb2.role]
    return None if role == options_pb2.ROLE_UNSPECIFIED else MethodInfo(path, Role(role), ours=True)
