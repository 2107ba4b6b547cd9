"""`python -m colocated_rank RANK ADDRESS FILE`: one of two ranks that leave shared devices.

Rank 1 needs a second for it, and then makes the file.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from trainer.colocation import SharedDevices
from trainer.ranks import Ranks


def main(rank: int, address: str, file: Path) -> None:
    class Policy:
        def move(self, device: torch.device) -> int:
            if rank == 1:
                time.sleep(1.0)
                file.touch()
            return 1

    policy: Any = Policy()
    spec: Any = SimpleNamespace(rank=rank, num_ranks=2, ranks_address=address, has_own_gpus=False)
    ranks = Ranks.join(spec, "cpu", timeout_s=60.0, order_timeout_s=60.0)
    SharedDevices(policy, (), torch.device("cpu"), is_shared=True, ranks=ranks).leave()
    print("released" if file.exists() else "announced while rank 1 has memory", flush=True)
    ranks.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
