"""The order of things at a token boundary: admission, steps, ends and swaps; over a decoder that the test plays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from areal_like.errors import EngineError, PolicyDiverged
from areal_like.trajectory import Segment
from areal_like.wire.messages import Sampling
from rollout.engine import core as core_module
from rollout.engine.core import LONGEST_REST, REST_PER_PROMPT, GenerationCore
from rollout.engine.port import GenerationOutcome, GenerationRequest
from rollout.engine.slots import Answer

VOCAB = 50
NUM_SLOTS = 4
NUM_BYTES = 1234
TOKEN_BYTES = 10


class FakeDecoder:
    """After each token comes the next number; what was asked of it is written down."""

    def __init__(self) -> None:
        self.vocab_size, self.can_share, self.max_moved_tokens = VOCAB, True, 10**9
        self.num_bytes = NUM_BYTES
        self.token_bytes = TOKEN_BYTES
        self.asked: list[tuple[Any, ...]] = []
        self.bad_rows: list[int] = []
        self.adapters_of_prefills: list[list[int]] = []
        self.adapters_of_steps: list[list[int]] = []
        self.order_cost: Any = lambda lengths_B: 0

    def prefill(
        self, rows: Sequence[int], contexts: Sequence[np.ndarray], starts: Sequence[int], adapters_N: Any
    ) -> None:
        if adapters_N is not None:
            self.adapters_of_prefills.append(adapters_N.tolist())
        if len(rows):
            self.asked.append(("prefill", list(rows), [context.tolist() for context in contexts], list(starts)))

    def share_rows(self, sources: Sequence[int], targets: Sequence[int], lengths: Sequence[int]) -> None:
        self.asked.append(("share", list(sources), list(targets), list(lengths)))

    def move_rows(self, sources: Sequence[int], targets: Sequence[int], lengths: Sequence[int]) -> None:
        self.asked.append(("move", list(sources), list(targets), list(lengths)))

    def save_row(self, row: int, num_tokens: int) -> str:
        self.asked.append(("save", row, num_tokens))
        return f"row {row}"

    def load_row(self, row: int, saved: str, num_tokens: int) -> None:
        self.asked.append(("load", row, saved, num_tokens))

    def clear_rows(self, rows: Sequence[int]) -> None:
        self.asked.append(("clear", list(rows)))

    def swap(self) -> None:
        self.asked.append(("swap",))

    def cost(self, lengths_B: np.ndarray) -> int:
        return int(self.order_cost(lengths_B))

    def step(self, tokens_B: np.ndarray, positions_B: np.ndarray, adapters_B: np.ndarray | None) -> torch.Tensor:
        if adapters_B is not None:
            self.adapters_of_steps.append(adapters_B.tolist())
        logits = torch.zeros(len(tokens_B), VOCAB)
        logits[torch.arange(len(tokens_B)), torch.from_numpy((tokens_B + 1) % VOCAB)] = 9.0
        logits[self.bad_rows] = torch.nan
        return logits

    def take_asked(self) -> list[tuple[Any, ...]]:
        asked, self.asked = self.asked, []
        return asked


class Bench:
    def __init__(self, **core: Any) -> None:
        self.made: list[FakeDecoder] = []
        self.core = GenerationCore(self.make, VOCAB, NUM_SLOTS, 40, torch.device("cpu"), **core)
        self.core.version = 0
        self.answers: dict[int, Answer] = {}

    def make(self) -> Any:
        self.made.append(FakeDecoder())
        return self.made[-1]

    @property
    def decoder(self) -> FakeDecoder:
        return self.made[-1]

    def submit(
        self, ticket: int, prompt: Sequence[int] = (1, 2, 3), *, prefix: Segment | None = None, share_key: int = -1,
        session_key: int = -1, max_new_tokens: int = 30, submitted_s: float = 0.0, adapter: int = -1,
    ) -> None:  # fmt: skip
        request = GenerationRequest(
            request_id=100 + ticket, prompt_P=np.array(prompt, np.int32), prefix=prefix or Segment.empty(),
            sampling=Sampling(temperature=0.0, max_new_tokens=max_new_tokens), seed=0, share_key=share_key,
            session_key=session_key, adapter="" if adapter < 0 else f"number-{adapter}",
        )  # fmt: skip
        self.answers[ticket] = Answer(ticket, request, np.zeros(0, np.int64), submitted_s, adapter)
        self.core.submit(self.answers[ticket])

    def steps(self, number: int = 1) -> None:
        for _ in range(number):
            self.core.refill()
            self.core.step()

    def ended(self) -> dict[int, tuple[str, list[int]]]:
        """How answers ended since the last look, by ticket: reason and new tokens."""
        return {
            ticket: (how.end_reason, how.segment.tokens_R.tolist())
            for ticket, how in self.core.take_ended()
            if isinstance(how, GenerationOutcome)
        }

    def progress(self) -> Mapping[int, list[int]]:
        return {number - 100: made.tokens_R.tolist() for number, made in self.core.progress().items()}


@pytest.mark.parametrize(("num_slots", "num_passes"), [(1, 5), (NUM_SLOTS, 0)])
def test_each_repeated_step_of_a_continued_answer_is_a_sign_of_life(num_slots: int, num_passes: int) -> None:
    bench = Bench()
    bench.core = GenerationCore(bench.make, VOCAB, num_slots, 40, torch.device("cpu"))
    bench.core.version = 0
    passes: list[int] = []
    bench.core.on_pass = lambda: passes.append(1)
    tokens = np.arange(3, 8, dtype=np.int32)
    versions = np.zeros(5, np.int32)
    bench.submit(0, prefix=Segment(tokens_R=tokens, logprobs_R=np.zeros(5, np.float32), versions_R=versions))
    bench.core.refill()
    assert len(passes) == num_passes
    bench.decoder.on_pass()  # type: ignore[attr-defined]
    assert len(passes) == num_passes + 1, "also the passes of the decoder"


@pytest.fixture
def bench() -> Bench:
    return Bench()


def segment(*tokens: int, version: int = 0) -> Segment:
    count = len(tokens)
    return Segment(np.array(tokens, np.int32), np.full(count, -0.5, np.float32), np.full(count, version, np.int32))


# ------------------------------------------------------------ admission


def test_answers_are_prefilled_up_to_their_newest_token_and_grow_by_a_token_a_step(bench: Bench) -> None:
    bench.submit(1, (1, 2, 3))
    bench.submit(2, (10,), prefix=segment(20, 21))
    bench.core.refill()
    assert bench.decoder.take_asked() == [("prefill", [0, 1], [[1, 2], [10, 20]], [0, 0])]
    bench.core.step()
    bench.steps(2)
    assert bench.decoder.take_asked() == []
    assert bench.progress() == {1: [4, 5, 6], 2: [22, 23, 24]}
    assert bench.core.counts == {
        "tokens": 6, "prefill_tokens": 4, "shared_prefill_tokens": 0, "kept_prefill_tokens": 0, "steps": 3, "swaps": 0,
        "moved_rows": 0,
    }  # fmt: skip


def test_nothing_is_admitted_without_weights_or_while_admission_is_closed(bench: Bench) -> None:
    bench.submit(1)
    for version, is_admitting in ((-1, True), (0, False)):
        bench.core.version, bench.core.is_admitting = version, is_admitting
        bench.core.refill()
        assert bench.progress() == {}
    bench.core.is_admitting = True
    bench.core.refill()
    assert bench.progress() == {1: []}


def test_no_more_answers_run_than_there_are_slots_and_the_oldest_come_first(bench: Bench) -> None:
    for ticket in range(NUM_SLOTS + 2):
        bench.submit(ticket, max_new_tokens=2)
    bench.steps(2)
    assert sorted(bench.ended()) == list(range(NUM_SLOTS))
    bench.core.refill()
    assert sorted(bench.progress()) == [NUM_SLOTS, NUM_SLOTS + 1]


def test_an_answer_with_tokens_of_a_newer_version_fails_and_one_of_this_version_goes_on(bench: Bench) -> None:
    bench.core.version = 3
    bench.submit(1, prefix=segment(5, version=4))
    bench.submit(2, prefix=segment(5, version=3))
    bench.core.refill()
    ((ticket, error),) = bench.core.take_ended()
    assert isinstance(error, EngineError)
    assert (ticket, str(error)) == (
        1,
        "the answer so far was sampled by version 4, which is newer than version 3 of the engine",
    )
    assert list(bench.progress()) == [2]
    assert bench.core.take_ended() == []


def test_rows_of_ended_answers_are_filled_by_new_ones_or_by_the_last_rows(bench: Bench) -> None:
    for ticket in range(4):
        bench.submit(ticket, (ticket + 1, ticket + 1), max_new_tokens=1 if ticket in (0, 1) else 20)
    bench.steps()
    assert bench.ended() == {0: ("length", [2]), 1: ("length", [3])}
    bench.submit(7, (30, 31))
    bench.decoder.take_asked()
    bench.core.refill()
    assert bench.decoder.take_asked() == [("prefill", [0], [[30]], [0]), ("move", [3], [1], [2])]
    assert bench.core.counts["moved_rows"] == 1
    bench.steps(2)
    assert bench.progress() == {7: [32, 33], 3: [5, 6, 7], 2: [4, 5, 6]}


# ------------------------------------------------------------ shared prompts


def test_answers_of_a_group_copy_the_prompt_of_the_longest_and_prefill_the_rest(bench: Bench) -> None:
    prompt = (1, 2, 3, 4)
    bench.submit(1, prompt, share_key=5)
    bench.submit(2, prompt, share_key=5, prefix=segment(9, 8))
    bench.submit(3, prompt, share_key=6)
    bench.submit(4, (1, 2), share_key=5)
    bench.core.refill()
    assert bench.decoder.take_asked() == [
        ("prefill", [1, 2, 3], [[1, 2, 3, 4, 9], [1, 2, 3], [1]], [0, 0, 0]), ("share", [1], [0], [3]),
        ("prefill", [0], [[1, 2, 3]], [3]),
    ]  # fmt: skip
    assert bench.core.counts["shared_prefill_tokens"] == 3
    assert bench.core.counts["prefill_tokens"] == 9


def test_a_decoder_that_cannot_share_computes_every_prompt(bench: Bench) -> None:
    bench.decoder.can_share = False
    for ticket in (1, 2):
        bench.submit(ticket, share_key=5)
    bench.core.refill()
    assert bench.decoder.take_asked() == [("prefill", [0, 1], [[1, 2], [1, 2]], [0, 0])]


@pytest.mark.parametrize("longest", [LONGEST_REST, 3])
def test_a_prompt_is_borrowed_by_what_has_little_behind_it(monkeypatch: pytest.MonkeyPatch, longest: int) -> None:
    monkeypatch.setattr(core_module, "LONGEST_REST", longest)
    limit = min(REST_PER_PROMPT * 2, longest)  # a prompt of three tokens holds two for the cache
    for num_behind, is_borrowed in ((limit, True), (limit + 1, False)):
        bench = Bench()
        bench.submit(1, share_key=5, prefix=segment(*range(20, 30)))
        bench.core.refill()
        bench.submit(2, share_key=5, prefix=segment(*range(10, 10 + num_behind)))
        bench.decoder.take_asked()
        bench.core.refill()
        assert (("share", [0], [1], [2]) in bench.decoder.take_asked()) == is_borrowed


def test_a_borrower_lends_in_its_turn_and_an_ended_answer_does_not(bench: Bench) -> None:
    bench.submit(1, share_key=5, max_new_tokens=1)
    bench.submit(2, share_key=5)
    bench.steps()
    bench.decoder.take_asked()
    bench.submit(3, share_key=5)
    bench.core.refill()
    assert bench.decoder.take_asked()[0] == ("share", [1], [0], [2])
    for ticket in (2, 3):
        bench.core.cancel(ticket)
    bench.submit(4, share_key=5)
    bench.core.refill()
    assert bench.decoder.take_asked()[0][0] == "prefill"


# ------------------------------------------------------------ order of rows


def test_rows_are_brought_into_order_only_where_a_look_is_due_and_it_pays(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_module, "LOOK_EVERY", 3)
    bench.submit(1, (1,))
    bench.submit(2, tuple(range(20)))
    bench.core.refill()
    bench.decoder.take_asked()
    bench.decoder.order_cost = lambda lengths_B: 1000 * (lengths_B[0] < lengths_B[1])
    for num_steps in range(1, 4):
        bench.core.step()
        bench.core.refill()
        moved = bench.decoder.take_asked()
        assert moved == ([("move", [1, 0], [0, 1], [22, 3])] if num_steps == 3 else []), num_steps
    assert bench.core.counts["moved_rows"] == 2
    bench.core.step()
    assert bench.progress() == {1: [2, 3, 4, 5], 2: [20, 21, 22, 23]}


# ------------------------------------------------------------ ends


def test_a_cancelled_answer_is_dropped_wherever_it_is_and_unknown_ones_are_ignored(bench: Bench) -> None:
    for ticket in range(NUM_SLOTS + 2):
        bench.submit(ticket)
    bench.steps()
    for ticket in (1, NUM_SLOTS, 99):
        bench.core.cancel(ticket)
    assert bench.core.take_ended() == [], "nobody waits for it"
    assert sorted(bench.progress()) == [0, 2, 3]
    bench.core.refill()
    assert sorted(bench.progress()) == [0, 2, 3, NUM_SLOTS + 1]


def test_all_answers_end_as_cancelled_with_the_tokens_they_have(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for ticket in range(NUM_SLOTS + 1):
        bench.submit(ticket, submitted_s=50.0)
    bench.steps(2)
    monkeypatch.setattr(core_module, "time", SimpleNamespace(monotonic=lambda: 53.0))
    bench.core.cancel_all()
    ended = dict(bench.core.take_ended())
    waiting = ended[NUM_SLOTS]
    assert isinstance(waiting, GenerationOutcome)
    assert (waiting.request_id, waiting.end_reason, len(waiting.segment), waiting.queue_s) == (104, "cancelled", 0, 3.0)
    for ticket in range(NUM_SLOTS):
        running = ended[ticket]
        assert isinstance(running, GenerationOutcome)
        assert (running.end_reason, running.segment.tokens_R.tolist()) == ("cancelled", [4, 5])
    assert bench.progress() == {}
    bench.core.refill()
    assert bench.progress() == {}


def test_an_outcome_says_how_long_it_waited_stood_still_and_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(core_module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    drawn: list[tuple[Any, ...]] = []
    tracer: Any = SimpleNamespace(
        draws=lambda number: number == 101, wall_s=lambda at_s: at_s + 1000.0,
        complete=lambda *given, **args: drawn.append((*given, args)),
    )  # fmt: skip
    bench = Bench(tracer=tracer)
    bench.core.paused_s = 7.0
    bench.submit(1, max_new_tokens=2, submitted_s=90.0)
    bench.submit(2, max_new_tokens=2, submitted_s=95.0)
    bench.core.refill()
    now_s[0] += 4.0
    bench.core.paused_s += 1.5
    bench.steps(2)
    outcomes = [how for _, how in bench.core.take_ended() if isinstance(how, GenerationOutcome)]
    assert [(how.queue_s, how.paused_s, how.generate_s) for how in outcomes] == [(10.0, 1.5, 2.5), (5.0, 1.5, 2.5)]
    args = {"request": 101, "tokens": 2, "end": "length"}
    assert drawn == [("generate", 1100.0, 1104.0, f"slot {bench.answers[1].slot}", args)], "the other is not drawn"
    bench.submit(3, max_new_tokens=1)
    bench.core.refill()
    bench.core.paused_s += 9.0  # its pause was measured a moment longer than the answer itself
    bench.core.step()
    ((_, outcome),) = bench.core.take_ended()
    assert isinstance(outcome, GenerationOutcome)
    assert outcome.generate_s == 0.0


def test_rows_whose_numbers_are_not_finite_fail_alone_and_leave_nothing_behind(bench: Bench) -> None:
    for ticket in range(3):
        bench.submit(ticket)
    bench.steps()
    bench.decoder.take_asked()
    bench.decoder.bad_rows = [0, 2]
    bench.core.version = 6
    bench.core.step()
    assert bench.decoder.take_asked() == [("clear", [0, 2])]
    ended = bench.core.take_ended()
    assert [ticket for ticket, _ in ended] == [0, 2]
    assert all(isinstance(error, PolicyDiverged) and error.version == 6 for _, error in ended)
    bench.decoder.bad_rows = []
    bench.steps()
    assert bench.progress() == {1: [4, 5, 6]}


@pytest.mark.parametrize(
    ("frozen", "adapter", "whose"),
    [("the frozen model in m", -1, "the frozen model in m"), ("the frozen model in m", 1, "adapter number-1"),
     ("", 0, "adapter number-0")],
)  # fmt: skip
def test_numbers_of_a_model_that_is_not_trained_are_not_said_to_have_diverged(
    frozen: str, adapter: int, whose: str
) -> None:
    bench = Bench(frozen=frozen, has_adapters=True)
    bench.submit(1, adapter=adapter)
    bench.decoder.bad_rows = [0]
    bench.steps()
    ((ticket, error),) = bench.core.take_ended()
    assert (ticket, type(error)) == (1, EngineError)
    assert str(error) == f"the log-probs of {whose} are not finite -> check the weights and the dtype of this model"


# ------------------------------------------------------------ versions


@pytest.mark.parametrize("interruption", ["recompute", "keep_kv"])
def test_after_a_swap_answers_go_on_under_the_new_version_with_keys_of_the_one_asked_for(
    bench: Bench, interruption: Any
) -> None:
    bench.submit(1, share_key=5)
    bench.steps(2)
    bench.decoder.take_asked()
    bench.core.swap(4, interruption)
    again = [("prefill", [0], [[1, 2, 3, 4]], [0])] if interruption == "recompute" else []
    assert bench.decoder.take_asked() == [("swap",), *again]
    bench.submit(2, share_key=5)
    bench.core.refill()
    is_shared = interruption == "recompute"  # a row with keys of the old weights lends nothing
    assert bench.decoder.take_asked()[0][0] == ("share" if is_shared else "prefill")
    bench.core.step()
    made = bench.core.progress()
    assert made[101].versions_R.tolist() == [0, 0, 4]
    assert made[102].versions_R.tolist() == [4]
    assert (bench.core.version, bench.core.counts["swaps"]) == (4, 1)


@pytest.mark.parametrize(("version", "left"), [(2, []), (3, [2]), (4, [1, 2])])
def test_answers_with_newer_tokens_end_when_an_older_version_is_swapped_in(
    bench: Bench, version: int, left: list[int]
) -> None:
    bench.core.version = 4
    bench.submit(1, prefix=segment(7, version=4))
    bench.core.refill()
    bench.core.version = 3
    bench.submit(2)
    bench.steps()
    bench.core.swap(version, "keep_kv")
    assert sorted(bench.progress()) == [ticket for ticket in left if ticket != 1 or version >= 4]
    assert all(reason == "cancelled" for reason, _ in bench.ended().values())


def test_released_memory_ends_all_answers_and_comes_back_empty() -> None:
    bench = Bench(has_memory=False)
    assert bench.made == []
    assert bench.core.release() == 0
    for _ in range(2):
        bench.core.take_memory()
    assert len(bench.made) == 1
    bench.submit(1, share_key=5)
    bench.steps()
    assert bench.core.release() == NUM_BYTES
    assert bench.ended() == {1: ("cancelled", [4])}
    assert (bench.core.version, bench.core.has_memory) == (-1, False)
    assert bench.core.release() == 0
    bench.core.take_memory()
    bench.core.version = 1
    bench.submit(2, share_key=5)
    bench.core.refill()
    assert bench.decoder.take_asked() == [("prefill", [0], [[1, 2]], [0])]
    assert len(bench.made) == 2


# ------------------------------------------------------------ adapters


def test_each_row_is_computed_with_the_adapter_of_its_answer_wherever_it_moves() -> None:
    bench = Bench(has_adapters=True)
    for ticket, (adapter, max_new_tokens) in enumerate([(1, 1), (-1, 3), (0, 2)]):
        bench.submit(ticket, max_new_tokens=max_new_tokens, adapter=adapter)
    bench.steps(3)
    assert bench.decoder.adapters_of_prefills[0] == [1, -1, 0]
    assert bench.decoder.adapters_of_steps == [[1, -1, 0], [0, -1], [-1]]


def test_answers_of_different_adapters_share_neither_prompts_nor_conversations() -> None:
    bench = Bench(has_adapters=True, session_bytes=10 * TOKEN_BYTES)
    for ticket, adapter in enumerate((-1, 0, 0)):
        bench.submit(ticket, share_key=5, session_key=8, max_new_tokens=1, adapter=adapter)
    bench.core.refill()
    asked = bench.decoder.take_asked()
    assert asked[:2] == [("prefill", [0, 1], [[1, 2], [1, 2]], [0, 0]), ("share", [1], [2], [2])]
    bench.core.step()
    bench.submit(3, (1, 2, 3, 4, 5), session_key=8, adapter=1)
    bench.core.refill()
    assert not [one for one in bench.decoder.take_asked() if one[0] == "load"]
    bench.submit(4, (1, 2, 3, 4, 5), session_key=8, adapter=0)
    bench.core.refill()
    assert [one for one in bench.decoder.take_asked() if one[0] == "load"]


def test_a_decoder_without_adapters_is_asked_for_none() -> None:
    bench = Bench()
    bench.submit(1)
    bench.steps(2)
    assert bench.decoder.adapters_of_prefills == bench.decoder.adapters_of_steps == []


# ------------------------------------------------------------ conversations


@pytest.fixture
def keeping() -> Bench:
    return Bench(session_bytes=10 * TOKEN_BYTES)


def test_the_next_turn_of_a_conversation_computes_only_what_came_after_the_last(keeping: Bench) -> None:
    keeping.submit(1, (1, 2, 3), session_key=8, max_new_tokens=2)
    keeping.steps(2)
    assert keeping.decoder.take_asked() == [("prefill", [0], [[1, 2]], [0]), ("save", 0, 4)]
    keeping.submit(2, (30,), max_new_tokens=5)
    keeping.submit(3, (1, 2, 3, 4, 5, 9, 9), session_key=8, max_new_tokens=1)
    keeping.steps()
    asked = keeping.decoder.take_asked()
    assert asked[0] == ("load", 1, "row 0", 4)
    assert asked[1:] == [
        ("prefill", [1, 0], [[1, 2, 3, 4, 5, 9], []], [4, 0]),
        ("save", 1, 7),
    ]
    assert keeping.core.counts["kept_prefill_tokens"] == 4
    assert keeping.core.counts["prefill_tokens"] == 2 + 2


def test_only_the_common_beginning_of_a_kept_turn_is_used(keeping: Bench) -> None:
    keeping.submit(1, (1, 2, 3), session_key=8, max_new_tokens=3)
    keeping.steps(3)
    keeping.submit(2, (1, 2, 7, 7), session_key=8, max_new_tokens=1)
    keeping.steps()
    assert ("load", 0, "row 0", 2) in keeping.decoder.take_asked()


def test_requests_without_a_session_and_cancelled_ones_keep_nothing(keeping: Bench) -> None:
    keeping.submit(1, max_new_tokens=1)
    keeping.submit(2, session_key=8)
    keeping.submit(3, session_key=9)
    keeping.steps()
    keeping.core.cancel(2)
    keeping.core.cancel_all()
    assert not len(keeping.core.sessions)
    assert not [asked for asked in keeping.decoder.take_asked() if asked[0] == "save"]


@pytest.mark.parametrize(("interruption", "num_kept"), [("recompute", 0), ("drain", 0), ("keep_kv", 1)])
def test_a_swap_drops_kept_conversations_unless_keys_and_values_are_kept(
    keeping: Bench, interruption: Any, num_kept: int
) -> None:
    keeping.submit(1, session_key=8, max_new_tokens=1)
    keeping.steps()
    keeping.core.swap(1, interruption)
    assert len(keeping.core.sessions) == num_kept


def test_a_conversation_that_is_over_or_too_long_is_not_kept(keeping: Bench) -> None:
    keeping.submit(1, session_key=8, max_new_tokens=1)
    keeping.submit(2, range(12), session_key=9, max_new_tokens=1)
    keeping.steps()
    assert len(keeping.core.sessions) == 1
    keeping.core.end_session(8)
    keeping.core.end_session(77)
    assert (len(keeping.core.sessions), keeping.core.sessions.num_bytes) == (0, 0)


def test_released_memory_counts_kept_conversations_and_drops_them(keeping: Bench) -> None:
    keeping.submit(1, (1, 2, 3), session_key=8, max_new_tokens=1)
    keeping.steps()
    assert keeping.core.release() == NUM_BYTES + 3 * TOKEN_BYTES
    assert not len(keeping.core.sessions)
