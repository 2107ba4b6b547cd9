"""Claims about single decisions of the lean decoder."""

from __future__ import annotations

import torch

from rollout.engine.decoder import LeanDecoder


def test_query_sees_keys_up_to_its_own_place() -> None:
    decoder = object.__new__(LeanDecoder)
    decoder.device = torch.device("cpu")
    starts = [0, 2, 5]
    seen = decoder._seen(starts, 3, 8)
    assert seen.shape == (3, 1, 3, 8)
    wanted = [[[[key <= start + query for key in range(8)] for query in range(3)]] for start in starts]
    assert seen.tolist() == wanted
