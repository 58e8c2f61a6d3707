"""Modules that commands import at their top, as any other, and that are loaded at their first use.

gRPC and the contract take longer to load than most commands take to run, and `--help`, completion and a mistyped option need
neither. `importlib.util.LazyLoader` does this too, but before Python 3.12 a second thread could see a module half loaded.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from importlib.abc import Loader, MetaPathFinder
else:
    Loader = MetaPathFinder = object  # which is all that they add, and their module costs 10 ms

DEFERRED = (
    "asyncio",
    "cryptography.x509",
    "difflib",
    "google.protobuf.internal.python_message",
    "google.protobuf.text_format",
    "gpuscale.allocator.settings",
    "gpuscale.autoscaler.adapters.engines.process.engine",
    "gpuscale.autoscaler.settings",
    "gpuscale.autoscaler.signals.rabbitmq",
    "gpuscale.cli.commands.doctor_host",
    "gpuscale.cli.console.cells",
    "gpuscale.cli.console.lookup",
    "gpuscale.cli.manifests",
    "gpuscale.cli.views.",
    "gpuscale.client",
    "gpuscale.common.rpc.",
    "gpuscale.common.runtime.lifecycle",
    "gpuscale.common.runtime.logs",
    "gpuscale.common.secrets",
    "gpuscale.common.security.",
    "gpuscale.common.wire",
    "gpuscale.dashboard.figures",
    "gpuscale.dashboard.web",
    "gpuscale.gateway.settings",
    "gpuscale.monitor.app.settings",
    "gpuscale.up.app",
    "grpc",
    "grpc.aio",
    "hashlib",
    "httpx",
    "inspect",
    "ipaddress",
    "numpy",
    "psutil",
    "re2",
    "shutil",
    "textwrap",
    "tokenize",
    "tomlkit",
    "tomllib",
)
"""Names of modules; with a dot at the end, of the package that they are all in."""


class _Deferred(ModuleType):
    """A module that has not been used yet."""

    def __getattr__(self, name: str) -> object:
        __import__(_first_use(self.__name__))
        return ModuleType.__getattribute__(self, name)

    def __dir__(self) -> list[str]:
        __import__(_first_use(self.__name__))
        return list(ModuleType.__dir__(self))


def _first_use(name: str) -> str:
    """The name by which a deferred module is loaded.

    To import this is to load the module, so the import system's own locks hold off other threads: one for each module, and
    where two threads wait for each other one of them goes on. A lock of ours beside them would be waited for for ever.
    """
    return f"first use of {name}".replace(".", "/")


class _Later(Loader):
    """Makes a module empty, and fills it when its first use is imported."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self.module: ModuleType | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module empty, or fill it where `module` stands for its first use."""
        deferred = self.module
        if deferred is None:
            self.module, module.__class__ = module, _Deferred
        else:
            self.loader.exec_module(deferred)
            deferred.__class__ = ModuleType


class _Finder(MetaPathFinder):
    """Finds deferred modules, and their first uses, before anybody else does."""

    uses: Final = dict[str, _Later]()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module where the import system finds it, to be loaded later."""
        if fullname in self.uses:
            return ModuleSpec(fullname, self.uses[fullname])
        if fullname not in DEFERRED and f"{fullname.rpartition('.')[0]}." not in DEFERRED:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            use = _first_use(fullname)
            sys.modules.pop(use, None)  # of a module that was unloaded
            spec.loader = self.uses[use] = _Later(spec.loader)
        return spec


def defer() -> None:
    """From now on, load these modules late."""
    sys.meta_path.insert(0, _Finder())
