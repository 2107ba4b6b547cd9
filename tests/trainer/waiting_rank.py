"""`python -m waiting_rank RANK FILE`: one of two ranks that meet at the file.

Rank 0 lets the other wait for a version and for a batch, each longer than an order may take.
"""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import Any

from trainer.ranks import Ranks

ORDER_TIMEOUT_S = 1.0


def main(rank: int, file: str) -> None:
    place: Any = SimpleNamespace(rank=rank, num_ranks=2, ranks_address=f"file://{file}", has_own_gpus=False)
    ranks = Ranks.join(place, "cpu", timeout_s=60.0, order_timeout_s=ORDER_TIMEOUT_S)
    if rank:
        assert ranks.versions.next_call() == 7
        assert ranks.next_batch() is None
    else:
        time.sleep(3 * ORDER_TIMEOUT_S)
        ranks.versions.call(7)
        time.sleep(3 * ORDER_TIMEOUT_S)
        ranks.end_batches()
    ranks.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
