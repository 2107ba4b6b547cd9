"""Draws follow the distribution, cuts are those of transformers, the stream depends on (seed, position) alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

from areal_like.trajectory import Segment
from areal_like.wire.messages import Sampling
from rollout.engine.sampler import DrawPlan, cut, draw, redraw, uniforms

CPU = torch.device("cpu")
LOGITS = torch.tensor([2.0, 1.5, 0.0, -1.0, 1.0, -3.0, 0.5, 0.2])
NUM_DRAWS = 20_000


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Pearson's statistic over the classes that can occur."""
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    expected = probabilities[possible] * counts.sum()
    return float(((counts[possible] - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.6, 1.0, 0), (1.0, 0.8, 0), (1.0, 1.0, 3), (1.3, 0.7, 5)]
)
def test_draws_follow_the_distribution_that_transformers_would_sample(
    temperature: float, top_p: float, top_k: int
) -> None:
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k)
    plan = DrawPlan.of([sampling] * NUM_DRAWS, len(LOGITS), CPU)
    stream = np.concatenate([uniforms(seed, 0, 20) for seed in range(NUM_DRAWS // 20)])
    tokens, logprobs = draw(LOGITS.expand(NUM_DRAWS, -1), plan, torch.from_numpy(stream))
    scores = (LOGITS / temperature)[None]
    before_cut = torch.log_softmax(scores, -1)[0]
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    counts = np.bincount(tokens[:, 0].numpy(), minlength=len(LOGITS))
    statistic = chi_square(counts, torch.softmax(scores, -1)[0].double().numpy())
    assert statistic < 24.3  # 0.999 quantile with 7 degrees of freedom, fewer where cut
    assert torch.allclose(logprobs[:, 0], before_cut[tokens[:, 0]], atol=1e-6)


def test_rows_of_one_batch_keep_their_own_parameters() -> None:
    samplings = [
        Sampling(temperature=0.0),
        Sampling(top_k=1),
        Sampling(temperature=2.0, top_p=1e-6),
        Sampling(temperature=1.0),
    ]
    logits = LOGITS.repeat(4, 1)
    plan = DrawPlan.of(samplings, len(LOGITS), CPU)
    tokens, logprobs = draw(logits, plan, torch.tensor([0.9, 0.9, 0.9, 1 - 2.0**-33], dtype=torch.float64))
    assert tokens[:, 0].tolist() == [0, 0, 0, 7]
    assert torch.allclose(logprobs[2, 0], torch.log_softmax(LOGITS / 2, -1)[0])
    assert torch.allclose(logprobs[0, 0], torch.log_softmax(LOGITS, -1)[0])


def test_impossible_tokens_are_never_drawn_at_the_ends_of_the_stream() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).repeat(2, 1)
    ends = torch.tensor([2.0**-33, 1 - 2.0**-33], dtype=torch.float64)
    tokens, _ = draw(logits, DrawPlan(), ends)
    assert tokens[:, 0].tolist() == [1, 3]


@pytest.mark.parametrize("start", [0, 1, 3, 4, 7, 101])
def test_stream_from_a_later_position_is_the_tail_of_the_stream(start: int) -> None:
    assert np.array_equal(uniforms(7, start, 50), uniforms(7, 0, start + 50)[start:])


def test_streams_of_different_seeds_differ_and_lie_strictly_inside_0_and_1() -> None:
    streams = np.stack([uniforms(seed, 0, 1000) for seed in (-1, 0, 1, 2**63, 2**64 - 2)])
    assert len(np.unique(streams)) > 4990
    assert streams.min() > 0
    assert streams.max() < 1
    assert abs(streams.mean() - 0.5) < 0.02


def test_the_stream_of_a_seed_is_that_of_every_release() -> None:
    """A sample that goes on elsewhere, perhaps after an update, goes on with the same numbers."""
    assert [int(number * 2**33) for number in uniforms(7, 3, 5)] == [
        3482292875, 711613263, 5984030983, 2545692335, 5330587089,
    ]  # fmt: skip
    assert np.array_equal(uniforms(2**64 + 7, 3, 5), uniforms(7, 3, 5)), "seeds count modulo 2**64"
    assert [int(number * 2**33) for number in uniforms(-1, 0, 2)] == [2018132875, 6161652411]


@pytest.mark.parametrize(
    ("samplings", "parts"),
    [
        ([{}], set()),
        ([{"top_k": 3}], {"top_k_B1", "top_p_B1"}),
        ([{"top_p": 0.9}], {"top_k_B1", "top_p_B1"}),
        ([{"temperature": 0.5}], {"temperature_B1"}),
        ([{"temperature": 0.0}], {"is_greedy_B1"}),
        ([{"temperature": 0.0, "top_k": 3, "top_p": 0.9}], {"is_greedy_B1"}),
        ([{"temperature": 0.0}, {}], {"is_greedy_B1"}),
        ([{"temperature": 0.0}, {"temperature": 0.5, "top_k": 3}], set(DrawPlan.__annotations__) - {"is_all_greedy"}),
        ([], set()),
    ],
)
def test_a_plan_has_only_the_parts_that_some_row_needs(samplings: list[dict[str, Any]], parts: set[str]) -> None:
    plan = DrawPlan.of([Sampling(**fields) for fields in samplings], 8, CPU)
    assert {name for name in DrawPlan.__annotations__ if getattr(plan, name) is not None} - {"is_all_greedy"} == parts
    assert plan.is_all_greedy == (bool(samplings) and all(fields.get("temperature") == 0 for fields in samplings))


def test_a_cut_keeps_the_likeliest_and_of_equal_tokens_the_first() -> None:
    logprobs = torch.log(torch.tensor([[0.25, 0.5, 0.125, 0.125]]))

    def kept(top_k: int, top_p: float) -> list[int]:
        supported = cut(logprobs, torch.tensor([[top_k]]), torch.tensor([[top_p]]))
        assert torch.equal(supported[supported > -torch.inf], logprobs[supported > -torch.inf])
        return (supported[0] > -torch.inf).nonzero()[:, 0].tolist()

    assert [kept(top_k, 2.0) for top_k in (1, 2, 3, 4)] == [[1], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
    assert [kept(4, top_p) for top_p in (0.4, 0.5, 0.6, 0.75, 0.8, 1.0)] == [
        [1], [1], [0, 1], [0, 1], [0, 1, 2], [0, 1, 2, 3],
    ]  # fmt: skip
    assert kept(2, 0.7) == [0, 1], "the share is of what the first cut left"
    assert kept(2, 0.6) == [1]


def test_a_cut_by_number_never_asks_for_more_tokens_than_there_are() -> None:
    for top_k in (0, 8, 9, 10**6):
        plan = DrawPlan.of([Sampling(top_k=top_k, top_p=0.99)], 8, CPU)
        assert plan.top_k_B1 is not None
        assert plan.top_k_B1.tolist() == [[8]]


def test_engine_samples_first_tokens_by_the_models_distribution(kit: Any) -> None:
    bench = kit.bench("qwen3")
    prompt = np.array([3, 1, 4], np.int32)
    requests = [kit.ask(i, prompt_P=prompt, max_new_tokens=1, share_key=0, temperature=2.0) for i in range(1500)]

    async def body() -> None:
        async with bench.engine(num_slots=256) as engine:
            outcomes = await kit.generate_all(engine, requests)
        counts = np.bincount([outcome.segment.tokens_R[0] for outcome in outcomes], minlength=kit.VOCAB)
        logits = bench.models[0](torch.from_numpy(prompt.astype(np.int64))[None]).logits[0, -1].double()
        assert chi_square(counts, torch.softmax(logits / 2.0, -1).numpy()) < 49.7  # 0.999 quantile, 23 degrees

    kit.run(body())


def test_sample_depends_on_seed_and_position_alone(kit: Any) -> None:
    """Alone, in a full batch, in segments, and resumed by another engine with other neighbours: the same tokens.

    A batch of another size may change log-probs in the last bits; a token changes only where its random number lies
    within about 1e-6 of a boundary of the cumulative distribution, which these 120 tokens do not meet.
    """
    bench = kit.bench("qwen3")
    requests = [kit.ask(i, prompt_length=3 + i, max_new_tokens=30, seed=100 + i) for i in range(4)]

    async def body() -> None:
        async with bench.engine(num_slots=1) as engine:
            alone = [(await kit.generate_all(engine, [request]))[0].segment for request in requests]
        async with bench.engine(num_slots=16) as engine:
            crowd = [kit.ask(50 + i, prompt_length=1 + i, max_new_tokens=5 + 3 * i) for i in range(20)]
            full = (await kit.generate_all(engine, [*crowd[:10], *requests, *crowd[10:]]))[10:14]
        for outcome, expected in zip(full, alone, strict=True):
            assert np.array_equal(outcome.segment.tokens_R, expected.tokens_R)
        prefixes = [request.prefix for request in requests]
        for round_ in range(4):
            async with bench.engine(num_slots=2 + round_) as engine:
                parts = [
                    kit.ask(
                        i, prompt_length=3 + i, max_new_tokens=30, seed=100 + i, prefix=prefixes[i], segment_tokens=8
                    )
                    for i in range(4)
                ]
                outcomes = await kit.generate_all(engine, parts)
            reason, length = ("segment", 8) if round_ < 3 else ("length", 6)
            assert all(outcome.end_reason == reason and len(outcome.segment) == length for outcome in outcomes)
            prefixes = [prefixes[i].joined(outcomes[i].segment) for i in range(4)]
        for prefix, expected in zip(prefixes, alone, strict=True):
            assert np.array_equal(prefix.tokens_R, expected.tokens_R)
            assert np.allclose(prefix.logprobs_R, expected.logprobs_R, atol=1e-4)

    kit.run(body())


@pytest.mark.parametrize("length", [1, 2, 7, 19])
def test_answer_continued_in_a_single_slot_has_the_bits_of_one_that_was_never_interrupted(
    kit: Any, length: int
) -> None:
    """Also its log-probs: with one slot the tokens of the prefix are repeated as steps, not prefilled."""
    bench = kit.bench()

    async def body() -> None:
        async with bench.engine(num_slots=1) as engine:
            (whole,) = await kit.generate_all(engine, [kit.ask(3)])
            segment = whole.segment
            prefix = Segment(segment.tokens_R[:length], segment.logprobs_R[:length], segment.versions_R[:length])
            (rest,) = await kit.generate_all(engine, [kit.ask(3, prefix=prefix)])
        assert rest.segment.tokens_R.tolist() == segment.tokens_R[length:].tolist()
        assert rest.segment.logprobs_R.tobytes() == segment.logprobs_R[length:].tobytes()

    kit.run(body())


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7), Sampling(top_p=0.8, top_k=5)], ids=str)
def test_margin_is_how_far_the_number_is_from_the_range_of_the_recorded_token(sampling: Sampling) -> None:
    """NumPy: the range of token t is from the sum of all probabilities before it to that with its own."""
    numbers = torch.from_numpy(uniforms(5, 0, 200))
    logits = torch.randn(200, 8, generator=torch.Generator().manual_seed(0))
    plan = DrawPlan.of([sampling], 8, CPU)
    drawn, _ = draw(logits, DrawPlan.of([sampling] * 200, 8, CPU), numbers)
    again, logprobs, margins = redraw(logits, plan, numbers, drawn)
    assert torch.equal(again, drawn)
    assert margins.abs().max() == 0
    recorded = torch.from_numpy(np.random.default_rng(0).integers(0, 8, (200, 1)))
    again, logprobs, margins = redraw(logits, plan, numbers, recorded)
    assert torch.equal(again, drawn)
    full = torch.log_softmax(logits / sampling.temperature, -1)
    assert torch.equal(logprobs, full.gather(-1, recorded))
    supported = full if sampling.top_p == 1 else cut(full, torch.tensor([[5]]), torch.tensor([[0.8]]))
    for row, (token, number) in enumerate(zip(recorded[:, 0].tolist(), numbers.tolist(), strict=True)):
        shares = np.exp(supported[row].double().numpy())
        shares /= shares.sum()
        low, high = shares[:token].sum(), shares[: token + 1].sum()
        expected = max(low - number, number - high, 0.0) if shares[token] else np.inf
        assert margins[row, 0].item() == pytest.approx(expected, abs=1e-6)


def test_number_at_a_border_is_within_rounding_of_both_tokens() -> None:
    logits = torch.zeros(2, 4)
    numbers = torch.tensor([0.5 - 1e-9, 0.5 + 1e-9], dtype=torch.float64)
    drawn, _, margins = redraw(logits, DrawPlan.of([Sampling()], 4, CPU), numbers, torch.tensor([[2], [1]]))
    assert drawn[:, 0].tolist() == [1, 2]
    assert margins[:, 0].tolist() == pytest.approx([1e-9, 1e-9], abs=1e-10)
