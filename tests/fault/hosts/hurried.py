"""A program with its patience shortened, so that a test need not wait for a quarter of a minute.

    python -m tests.fault.hosts.hurried MODULE ARGUMENTS ...

Adapters report each half second, and the autoscaler takes one for silent after three: as ever, six reports.
"""

import importlib
import sys

from gpuscale.autoscaler.adapters import connection
from gpuscale.autoscaler.loop import hub

SILENT = 3.0
REPORT_PERIOD = 0.5


def main(module: str, arguments: list[str]) -> int:
    """Run the program in that module."""
    vars(hub)["SILENT"] = SILENT
    vars(connection)["REPORT_PERIOD"] = REPORT_PERIOD
    code: int = importlib.import_module(module).main(arguments)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
