"""A hub or peer that nobody closed never blocks the process that drops it."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("num_sockets", [1, 3])
def test_a_context_and_sockets_that_become_garbage_together_do_not_block(num_sockets: int) -> None:
    code = f"""
import gc
import zmq
from areal_like.transport.sockets import ReadySocket, open_context
context = open_context()
owner = {{"sockets": [ReadySocket(context, zmq.ROUTER, print) for _ in range({num_sockets})], "context": context}}
owner["itself"] = owner
del context, owner
gc.collect()
print("collected")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "collected\n"), done.stderr
