"""Rows in blocks: every row sees all its keys, padding is spared where it costs, and moves change no answer."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.engine.row_order import (
    LOOK_EVERY,
    SPAN_TOKENS,
    Block,
    blocks_of,
    moves_that_pay,
    order_of,
    spans_of,
    tokens_read,
)

TOLERANCE = 1e-4
LENGTHS = st.lists(st.integers(1, 200), min_size=1, max_size=60).map(np.array)
CONTEXT = 200
UNBOUNDED = 10**9


def ordered(lengths_B: np.ndarray, sources: Any, targets: Any) -> np.ndarray:
    """Lengths by row after the moves."""
    after_B = lengths_B.copy()
    after_B[targets] = lengths_B[sources]
    return after_B


@given(lengths_B=LENGTHS, call_tokens=st.integers(1, 2000))
def test_blocks_cover_every_row_once_and_reach_its_last_key(lengths_B: np.ndarray, call_tokens: int) -> None:
    blocks = blocks_of(lengths_B, CONTEXT, call_tokens)
    assert [row for block in blocks for row in range(block.start, block.stop)] == list(range(len(lengths_B)))
    for block in blocks:
        assert lengths_B[block.start : block.stop].max() <= block.span <= CONTEXT
        assert block.span % SPAN_TOKENS == 0 or block.span == CONTEXT
    spans = [block.span for block in blocks]
    assert spans == sorted(set(spans), reverse=True)
    for longer, shorter in itertools.pairwise(blocks):  # each cut spares at least what it costs
        assert (longer.span - shorter.span) * (shorter.stop - shorter.start) >= call_tokens


def test_a_tail_of_few_long_rows_does_not_cost_all_others_its_span() -> None:
    lengths_B = np.array([190, 180, *[20] * 30])
    assert blocks_of(lengths_B, CONTEXT, 100) == [Block(0, 2, 192), Block(2, 32, 32)]
    assert blocks_of(lengths_B[::-1], CONTEXT, 100) == [Block(0, 32, 192)]  # short ones before it read as far
    assert blocks_of(lengths_B, CONTEXT, UNBOUNDED) == [Block(0, 32, 192)]  # a call that dear is not worth it


@given(lengths_B=LENGTHS, max_tokens=st.integers(0, 3000))
def test_order_is_a_permutation_of_rows_within_its_tokens(lengths_B: np.ndarray, max_tokens: int) -> None:
    sources, targets = order_of(lengths_B, CONTEXT, max_tokens)
    assert sorted(sources) == sorted(targets)
    assert len(set(targets.tolist())) == len(targets)
    assert lengths_B[sources].sum() <= max_tokens
    after_B = ordered(lengths_B, sources, targets)
    assert tokens_read(blocks_of(after_B, CONTEXT, 1)) <= tokens_read(blocks_of(lengths_B, CONTEXT, 1))


@given(lengths_B=LENGTHS)
def test_with_room_enough_the_order_reads_as_little_as_a_sorted_one(lengths_B: np.ndarray) -> None:
    after_B = ordered(lengths_B, *order_of(lengths_B, CONTEXT, UNBOUNDED))
    assert tokens_read(blocks_of(after_B, CONTEXT, 1)) == spans_of(lengths_B, CONTEXT).sum()
    assert not len(order_of(after_B, CONTEXT, UNBOUNDED)[0])


@given(lengths_B=LENGTHS, call_tokens=st.integers(1, 500))
def test_moves_are_made_only_where_they_spare_more_than_they_copy(lengths_B: np.ndarray, call_tokens: int) -> None:
    def blocks(lengths_B: np.ndarray) -> list[Block]:
        return blocks_of(lengths_B, CONTEXT, call_tokens)

    moves = moves_that_pay(lengths_B, blocks, CONTEXT, UNBOUNDED)
    if moves is not None:
        spared = tokens_read(blocks(lengths_B)) - tokens_read(blocks(ordered(lengths_B, *moves)))
        assert spared * LOOK_EVERY > lengths_B[moves[0]].sum()


def test_rows_in_order_or_in_one_block_are_left_alone() -> None:
    falling_B = np.arange(200, 0, -1)
    for lengths_B, call_tokens in ((falling_B, 1), (falling_B[::-1], UNBOUNDED), (np.full(64, 9), 1)):
        assert moves_that_pay(lengths_B, lambda of: blocks_of(of, CONTEXT, call_tokens), CONTEXT, UNBOUNDED) is None  # noqa: B023


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_answers_of_a_long_tail_change_places_and_keep_their_logprobs(
    kit: Any, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.engine.kv_cache.CPU_CALL_BYTES", 1)
    bench = kit.bench(family)
    rng = np.random.default_rng(0)
    requests = [
        kit.ask(i, prompt_length=int(rng.integers(1, 12)), max_new_tokens=int(min(90, 1 + rng.geometric(0.04))))
        for i in range(60)
    ]
    blocks: set[int] = set()

    async def body() -> Any:
        async with bench.engine(num_slots=24) as engine:
            cache = engine._core.decoder.cache  # type: ignore[union-attr]
            honest = cache.plan

            def counted(*args: Any) -> Any:
                plan = honest(*args)
                blocks.add(len(plan.blocks))
                return plan

            cache.plan = counted  # type: ignore[method-assign]
            return await kit.generate_all(engine, requests), engine.counters()

    outcomes, counters = kit.run(body())
    assert max(blocks) > 2
    assert counters["moved_rows"] > 60  # more than one for each answer that ends
    for request, outcome in zip(requests, outcomes, strict=True):
        assert len(outcome.segment) == request.sampling.max_new_tokens
        assert bench.worst_error(request, outcome.segment) < TOLERANCE
