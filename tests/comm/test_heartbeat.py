"""The thread that tells the other ranks where this one is."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import atexit, threading
import torch.distributed as dist

def threads():
    return [thread for thread in threading.enumerate() if thread.name == "fzero presence"]

atexit.register(lambda: print(len(threads()), "at the end"))  # runs after what is registered below
from fzero.comm import heartbeat

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
presence = heartbeat.of()
presence.heartbeat.start()
dist.destroy_process_group()
print(len(threads()), "without its group")
"""


def test_its_thread_ends_before_python_does() -> None:
    """One that is in the store while Python ends, ends the process with SIGABRT."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "1 without its group\n0 at the end\n"), done.stderr
