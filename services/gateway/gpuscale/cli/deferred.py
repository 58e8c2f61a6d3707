"""Modules that commands import at their top, as any other, and that are loaded when something of them is first used.

gRPC and the contract take longer to load than most commands take to run, and `--help`, completion and a mistyped option need
neither. `importlib.util.LazyLoader` does this too, but before Python 3.12 a second thread could see a module half loaded.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from threading import RLock
from types import ModuleType

DEFERRED = (
    "gpuscale.api.allocator.v1",
    "gpuscale.api.autoscaler.v1",
    "gpuscale.api.monitor.v1",
    "gpuscale.api.types.v1",
    "gpuscale.cli.commands.doctor_host",
    "gpuscale.cli.console.cells",
    "gpuscale.cli.console.lookup",
    "gpuscale.cli.manifests.",
    "gpuscale.cli.views.",
    "gpuscale.client",
    "gpuscale.common.wire",
)
"""Names of modules; with a dot at the end, of the package that they are all in."""
_loading = RLock()


class _Deferred(ModuleType):
    """A module of which nothing has been used yet."""

    def __getattr__(self, name: str) -> object:
        spec = self.__spec__
        with _loading:
            if spec is not None and isinstance(later := spec.loader, _Later):
                spec.loader = later.loader
                try:
                    later.loader.exec_module(self)
                    object.__setattr__(self, "__class__", ModuleType)
                finally:
                    if type(self) is _Deferred:  # the next use tries it again
                        spec.loader = later
        return ModuleType.__getattribute__(self, name)


class _Later(Loader):
    """Makes modules that `loader` loads at their first use."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As its own loader makes it."""
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Leave it empty."""
        module.__class__ = _Deferred


class _Finder(MetaPathFinder):
    """Finds deferred modules before anybody else does."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module where the import system finds it, to be loaded later."""
        if fullname not in DEFERRED and f"{fullname.rpartition('.')[0]}." not in DEFERRED:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Later(spec.loader)
        return spec


def defer() -> None:
    """From now on, load these modules late."""
    sys.meta_path.insert(0, _Finder())
