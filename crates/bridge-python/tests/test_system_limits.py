"""Limits of the system that are reached in the middle of a call: each is an error that names the limit."""

from __future__ import annotations

import pytest

from programs import Warm

#: Leaves this many descriptors.
DESCRIPTORS = """
import os, resource, sys, tempfile, time
import numpy as np, truebridge as tb
if loaded:
    tb.processes, tb.names
folder = tempfile.mkdtemp()
os.environ["TRUEBRIDGE_IPC"] = folder + "/ipc"
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
files = []
while True:
    try:
        files.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        break
for file in files[:left]:
    os.close(file)
try:
    made = tb.share(np.ones(3)) if what == "share" else tb.serve(folder + "/names")
except tb.BridgeError as error:
    assert isinstance(error, MemoryError) and error.kind == "out_of_memory", repr(error)
    assert "ulimit -n" in str(error), error
    print("refused")
else:
    print("made")
for file in files[left:]:
    os.close(file)
"""


@pytest.mark.parametrize("what", ["share", "serve"])
@pytest.mark.parametrize("left", range(6))
@pytest.mark.parametrize("loaded", [True, False])
def test_without_descriptors_the_limit_is_named(what: str, left: int, loaded: bool, beside_torch: Warm) -> None:
    done = beside_torch.run(f"what, left, loaded = {what!r}, {left}, {loaded}\n{DESCRIPTORS}")
    # Libraries may complain of files that they cannot open.
    assert done.returncode == 0, done.stderr
    # How many it takes depends on the system, but none is too few and ten would do.
    assert done.stdout == "refused\n" if left == 0 else done.stdout in ("refused\n", "made\n")


def test_a_limit_of_file_sizes_is_named(beside_torch: Warm) -> None:
    done = beside_torch.run("""
        import resource
        import numpy as np, truebridge as tb
        tb.share(np.ones(3))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        try:
            tb.share(np.ones(1 << 20))
        except tb.BridgeMemoryError as error:
            assert error.kind == "out_of_memory" and "ulimit -f" in str(error), error
            print("refused")
    """)
    assert (done.stdout, done.stderr) == ("refused\n", "")


def test_memory_of_the_host_that_runs_out_in_pytorch_is_a_memory_error(beside_torch: Warm) -> None:
    done = beside_torch.run("""
        import numpy as np, torch, truebridge as tb
        # No machine has that much.
        array = np.lib.stride_tricks.as_strided(np.zeros(1), (1 << 44,), (0,))
        for call in (tb.to_torch, tb.to_numpy):
            try:
                call(array, copy=True)
            except MemoryError as error:
                print(getattr(error, "kind", None), type(error.__cause__).__name__)
        try:
            tb.to_torch({"a": [array]}, copy=True)
        except tb.BridgeMemoryError as error:
            print(str(error)[:12], error.kind)
    """)
    assert done.stderr == ""
    assert done.stdout == "out_of_memory RuntimeError\nNone NoneType\ntree['a'][0] out_of_memory\n"


#: Opens a ticket in another process.
OPENED = """
import os, shutil, subprocess, sys, tempfile, time
import numpy as np, truebridge as tb
folder = tempfile.mkdtemp()
os.environ["TRUEBRIDGE_IPC"] = folder + "/ipc"
OPEN = "import sys, truebridge as tb; print(tb.open(sys.argv[1], 'numpy')[0])"
def opened(ticket):
    done = subprocess.run([sys.executable, "-c", OPEN, ticket.text], capture_output=True, text=True)
    return done.stdout.strip() or done.stderr[-300:]
first = tb.share(np.ones(3))
assert opened(first) == "1.0", opened(first)
"""

SOCKETS = {
    "folder": "shutil.rmtree(folder + '/ipc')",
    "socket": "[os.remove(entry) for entry in os.scandir(folder + '/ipc')]",
    "descriptors": "os.closerange(3, 4096)",
    "descriptors of others": """
os.closerange(3, 4096)
others = [open(f"{folder}/{number}", "w+b") for number in range(16)]
""",
}


def test_a_ticket_of_a_socket_that_was_removed_is_revoked(beside_torch: Warm) -> None:
    done = beside_torch.run(f"""{OPENED}{SOCKETS["folder"]}
second = tb.share(np.full(3, 2.0))
assert tb.processes.held()["shares"] == 2
tb.revoke(first)
assert tb.processes.held()["shares"] == 1
tb.processes.end(second)
""")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("what", SOCKETS)
def test_a_socket_that_the_program_took_away_is_made_again(what: str, beside_torch: Warm) -> None:
    done = beside_torch.run(f"""{OPENED}{SOCKETS[what]}
second = tb.share(np.full(3, 2.0))
assert opened(second) == "2.0", opened(second)
tb.revoke(second)
third = tb.share(np.full(3, 3.0))
assert opened(third) == "3.0", opened(third)
tb._core.ipc_close()
for entry in os.scandir(folder):
    assert entry.is_dir() or entry.stat().st_size == 0, "nothing was written to a file of the program"
""")
    assert (done.returncode, done.stderr) == (0, "")
