"""Sends messages to a loopback port as fast as possible, until one is received. Arguments: port, bytes, maximum
seconds.
"""

from __future__ import annotations

import sys
import time

import zmq

WAIT_MS = 5000


def main() -> None:
    port, num_bytes, most_s = map(int, sys.argv[1:])
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(f"tcp://127.0.0.1:{port}")
    # smaller messages are copied, which is cheaper than tracking them
    payload, is_small = bytes(num_bytes), num_bytes < 65_536
    until_s = time.monotonic() + most_s
    while time.monotonic() < until_s:
        events = socket.poll(WAIT_MS, zmq.POLLIN | zmq.POLLOUT)
        if not events or events & zmq.POLLIN:
            break
        try:
            for _ in range(100 if is_small else 1):
                socket.send(payload, zmq.NOBLOCK, copy=is_small)
        except zmq.Again:
            continue
    socket.close()
    context.term()
    print("areal_like-doctor {}", flush=True)


main()
