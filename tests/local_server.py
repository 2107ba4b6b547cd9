"""A server of the tests' own, as a process that listens on loopback."""

from __future__ import annotations

import contextlib
import socket
import subprocess
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def listening(command: Callable[[int], list[str]]) -> Iterator[int]:
    """The port on which the process of `command(port)` listens by now; it is killed at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    child = subprocess.Popen(command(port), stderr=subprocess.DEVNULL)
    try:
        while child.poll() is None:  # bounded by the test's own limit
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                continue
        assert child.poll() is None, f"the server ended with {child.returncode}"
        yield port
    finally:
        child.kill()
        child.wait()
