"""Imports gRPC so that its core writes nothing to stderr: lines of its own format would stand among those of the log.

Programs import it before anything that imports gRPC, which is when the core reads its variable. Whoever sets GRPC_VERBOSITY
gets the lines. The variable is not left behind for the programs that this one starts.
"""

import os
from importlib import import_module

_VARIABLE = "GRPC_VERBOSITY"

if _VARIABLE not in os.environ:
    os.environ[_VARIABLE] = "NONE"
    import_module("grpc")

    del os.environ[_VARIABLE]
