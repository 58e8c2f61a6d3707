"""Processes of other PID namespaces."""

import os
import shutil
import subprocess

from gpuscale.client.this_host import pid_namespace
from gpuscale.monitor.agent.processes import ProcessNames
from tests.support.fixtures import need

ALONE = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc")
SAYS = "stat -Lc %i /proc/self/ns/pid; exec sleep 900"


def test_a_pid_counts_in_the_namespace_that_it_is_of() -> None:
    names = ProcessNames()
    assert names.in_namespace(os.getpid(), None) == os.getpid()
    assert names.in_namespace(os.getpid(), pid_namespace()) == os.getpid()
    assert names.in_namespace(os.getpid(), 1) is None
    if shutil.which("unshare") is None:
        need("no unshare (Debian package util-linux)")
    with subprocess.Popen([*ALONE, "sh", "-c", SAYS], stdout=subprocess.PIPE, text=True) as outside:
        assert outside.stdout is not None
        namespace = int(outside.stdout.readline())
        inside = names.in_namespace(1, namespace)
        assert inside is not None
        found = names.find(inside)
        assert found is not None
        assert outside.pid in [key.pid for key in found.lineage]
        assert names.in_namespace(2, namespace) != inside
        os.kill(inside, 9)
