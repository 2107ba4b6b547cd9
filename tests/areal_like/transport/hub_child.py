"""A hub in a process of its own for test_hub_attack.py: `hub_child.py KEYS`; obeys `read` and `say` on stdin."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from areal_like.transport.channel import Hub
from areal_like.wire.messages import SampleAck, SampleReturned


async def main(keys: Path) -> None:
    hub = Hub(
        run_id="r", role="controller", bind="tcp://127.0.0.1:0", curve_dir=keys, accept=frozenset({SampleReturned})
    )
    print(await hub.start(), flush=True)
    commands: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    loop.add_reader(0, lambda: commands.put_nowait(sys.stdin.readline().strip()))
    reading, num_read = False, 0
    while True:
        if reading:
            received = await hub.receive(0.05)
            if received is not None and isinstance(received[1], SampleReturned):
                num_read += 1
                hub.send(received[0], SampleAck(lease_ids=(received[1].lease_id,)))
        else:
            await asyncio.sleep(0.05)
        while not commands.empty():
            command = commands.get_nowait()
            if not command:
                return
            reading |= command == "read"
            if command == "say":
                facts = {"num_read": num_read, "peers": sorted(hub.peers), "counters": hub.counters}
                print(json.dumps(facts), flush=True)


asyncio.run(main(Path(sys.argv[1])))
