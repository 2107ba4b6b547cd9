"""Rows in blocks: every row sees all its keys, costly padding is avoided, and moves change no answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.engine.row_order import (
    COPY_COST,
    LOOK_EVERY,
    ONE_BLOCK,
    SPAN_TOKENS,
    Block,
    blocks_of,
    cost_of,
    moves_that_pay,
    order_of,
    spans_of,
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


def read(lengths_B: np.ndarray) -> int:
    """Keys that a step reads where a block costs nothing."""
    return cost_of(blocks_of(lengths_B, CONTEXT, 1), 0)


@given(lengths_B=LENGTHS, call_tokens=st.integers(1, 2000))
def test_blocks_cover_every_row_once_and_reach_its_last_key(lengths_B: np.ndarray, call_tokens: int) -> None:
    blocks = blocks_of(lengths_B, CONTEXT, call_tokens)
    assert [row for block in blocks for row in range(block.start, block.stop)] == list(range(len(lengths_B)))
    for block in blocks:
        assert lengths_B[block.start : block.stop].max() <= block.span <= CONTEXT
        assert block.span % SPAN_TOKENS == 0 or block.span == CONTEXT
    spans = [block.span for block in blocks]
    assert spans == sorted(set(spans), reverse=True)


@given(lengths_B=LENGTHS, call_tokens=st.integers(1, 2000))
def test_no_block_holds_padding_that_costs_as_much_as_a_call(lengths_B: np.ndarray, call_tokens: int) -> None:
    falling_B = np.sort(lengths_B)[::-1]
    for block in blocks_of(falling_B, CONTEXT, call_tokens):
        padding = (block.span - spans_of(falling_B[block.start : block.stop], CONTEXT)).sum()
        assert padding < call_tokens


@given(lengths_B=LENGTHS, call_tokens=st.integers(1, 2000))
def test_blocks_cost_no_more_than_twice_the_least(lengths_B: np.ndarray, call_tokens: int) -> None:
    falling_B = np.sort(lengths_B)[::-1]
    spans = spans_of(falling_B, CONTEXT).tolist()
    least = [0]  # of the first rows, by every place of the last cut
    for stop in range(1, len(spans) + 1):
        least.append(min(least[start] + call_tokens + (stop - start) * spans[start] for start in range(stop)))
    found = cost_of(blocks_of(falling_B, CONTEXT, call_tokens), call_tokens) + call_tokens
    assert least[-1] <= found <= 2 * least[-1]


def test_a_tail_of_few_long_rows_does_not_cost_all_others_its_span() -> None:
    lengths_B = np.array([190, 180, *[20] * 30])
    assert blocks_of(lengths_B, CONTEXT, 100) == [Block(0, 2, 192), Block(2, 32, 32)]
    assert blocks_of(lengths_B[::-1], CONTEXT, 100) == [Block(0, 32, 192)]  # short ones before it read as far
    assert blocks_of(lengths_B, CONTEXT, ONE_BLOCK) == [Block(0, 32, 192)]


@given(lengths_B=LENGTHS, max_tokens=st.integers(400, 3000))
def test_order_is_a_permutation_of_rows_within_its_tokens(lengths_B: np.ndarray, max_tokens: int) -> None:
    sources, targets = order_of(lengths_B, CONTEXT, max_tokens)
    assert sorted(sources) == sorted(targets)
    assert len(set(targets.tolist())) == len(targets)
    assert lengths_B[sources].sum() <= max_tokens


@given(lengths_B=LENGTHS, max_tokens=st.integers(0, 1000))
def test_looks_after_one_another_come_to_an_order_that_reads_as_little_as_a_sorted_one(
    lengths_B: np.ndarray, max_tokens: int
) -> None:
    after_B = lengths_B
    for _ in range(len(lengths_B)):
        after_B = ordered(after_B, *order_of(after_B, CONTEXT, max_tokens))
    assert sorted(after_B) == sorted(lengths_B)
    assert read(after_B) == spans_of(lengths_B, CONTEXT).sum()
    assert not len(order_of(after_B, CONTEXT, max_tokens)[0])


@given(lengths_B=LENGTHS, call_tokens=st.integers(1, 500))
def test_moves_are_made_just_where_they_spare_more_than_they_cost(lengths_B: np.ndarray, call_tokens: int) -> None:
    def cost(lengths_B: np.ndarray) -> int:
        return cost_of(blocks_of(lengths_B, CONTEXT, call_tokens), call_tokens)

    sources, targets = order_of(lengths_B, CONTEXT, UNBOUNDED)
    spared = cost(lengths_B) - cost(ordered(lengths_B, sources, targets))
    pays = LOOK_EVERY * spared > COPY_COST * lengths_B[sources].sum()
    moves = moves_that_pay(lengths_B, cost, CONTEXT, UNBOUNDED)
    assert moves == ((sources.tolist(), targets.tolist()) if pays else None)


def test_a_long_row_at_the_end_comes_to_the_front_and_rows_in_order_stay() -> None:
    def moves(lengths: list[int], call_tokens: int) -> Any:
        def cost(lengths_B: np.ndarray) -> int:
            return cost_of(blocks_of(lengths_B, CONTEXT, call_tokens), call_tokens)

        return moves_that_pay(np.array(lengths), cost, CONTEXT, UNBOUNDED)

    assert moves([*[20] * 30, 190], 100) == ([30, 0], [0, 30])
    assert moves([190, *[20] * 30], 100) is None
    assert moves([*[20] * 30, 190], ONE_BLOCK) is None
    assert moves([9] * 64, 1) is None


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_answers_of_a_long_tail_change_places_and_keep_their_logprobs(kit: Any, family: str) -> None:
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
