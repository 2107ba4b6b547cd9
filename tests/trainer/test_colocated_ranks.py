"""With several ranks of the trainer the devices are given away only once every rank has released its memory."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

RANK = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
import torch
from trainer.colocation import SharedDevices
from trainer.ranks import Ranks

rank, address, file = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])

class Policy:
    def move(self, device):
        if rank == 1:
            time.sleep(1.0)
            file.touch()
        return 1

spec = SimpleNamespace(rank=rank, num_ranks=2, ranks_address=address, has_own_gpus=False)
ranks = Ranks.join(spec, "cpu", timeout_s=60.0, order_timeout_s=60.0)
SharedDevices(Policy(), (), torch.device("cpu"), is_shared=True, ranks=ranks).leave()
print("released" if file.exists() else "announced while rank 1 has memory")
ranks.close()
"""


def test_rank_0_announces_nothing_before_every_rank_has_released_its_memory(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    arguments = [address, str(tmp_path / "released")]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), *arguments],
            stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=300)[0].strip() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert outputs == ["released", "released"]
