"""The generation loop's body: admit, step, swap, cancel. One thread, no asyncio, no clock but for timings.

Owns: the order of things at a token boundary, and what an ended answer's outcome says. Refuses: threads and futures
(embedded.py), the forward pass (the decoder's).

Invariant between calls: for each running answer the cache holds every token but the newest, which the next step feeds.
So a fresh prompt, a continued answer and a re-prefill after a swap are one thing: prefill all tokens but the last, less
what a row of the same group can lend, or what was kept of the turn before in the same conversation.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch

from areal_like.errors import EngineError, PolicyDiverged
from areal_like.trace import Tracer
from areal_like.trajectory import Segment
from rollout.config import Interruption
from rollout.engine.decoder import Decoder
from rollout.engine.device import give_back
from rollout.engine.port import EndReason, GenerationOutcome
from rollout.engine.row_order import LOOK_EVERY, moves_that_pay
from rollout.engine.sampler import DrawPlan, draw
from rollout.engine.scheduler import Scheduler
from rollout.engine.sessions import KeptRow, Sessions
from rollout.engine.slots import Answer, Slots

REST_PER_PROMPT = 2
"""Tokens behind a prompt, for each of its own, up to which an answer that goes on borrows it."""
LONGEST_REST = 1024
"""Behind any prompt: what a token sees is a mask [tokens, tokens and prompt]."""
Ended = tuple[int, GenerationOutcome | EngineError]
"""(ticket, how it ended)."""


class GenerationCore:
    """Continuous batching over a decoder. `lock` guards what `progress` reads from another thread."""

    def __init__(
        self,
        make_decoder: Callable[[], Decoder],
        vocab_size: int,
        num_slots: int,
        max_context: int,
        device: torch.device,
        tracer: Tracer | None = None,
        *,
        has_memory: bool = True,
        session_bytes: int = 0,
    ) -> None:
        """`make_decoder` allocates a decoder's memory: now, if `has_memory`, and again after each release.
        `session_bytes`: for keys and values of conversations between their turns."""
        self._make_decoder, self.device, self._tracer = make_decoder, device, tracer
        self.vocab_size, self.has_memory = vocab_size, has_memory
        if has_memory:
            self.decoder = make_decoder()
        self.slots, self.scheduler = Slots(num_slots, max_context), Scheduler(num_slots)
        self.sessions = Sessions(session_bytes)
        self.version = -1
        self.is_admitting = True
        self.paused_s = 0.0
        """How long generation has stood still, all in all; its owner adds to it."""
        names = ("tokens", "prefill_tokens", "shared_prefill_tokens", "kept_prefill_tokens", "steps", "swaps",
                 "moved_rows")  # fmt: skip
        self.counts = dict.fromkeys(names, 0)
        self._ended: list[Ended] = []
        self._plan: DrawPlan | None = None
        self._lock = threading.Lock()

    # ------------------------------------------------------------------ requests

    def submit(self, answer: Answer) -> None:
        """Queue an answer."""
        self.scheduler.push(answer)

    def cancel(self, ticket: int) -> None:
        """Drop an answer, wherever it is; unknown tickets (it has just ended) are ignored."""
        if self.scheduler.remove(ticket) is None:
            for answer in self.slots.running():
                if answer.ticket == ticket:
                    self._release(answer)

    def cancel_all(self) -> None:
        """End every answer as `cancelled`, with the tokens it has."""
        for answer in self.slots.running():
            self._end(answer, "cancelled")
        for answer in self.scheduler.drain():
            self._ended.append((answer.ticket, GenerationOutcome(
                request_id=answer.request.request_id, segment=Segment.empty(), end_reason="cancelled",
                queue_s=time.monotonic() - answer.submitted_s,
            )))  # fmt: skip

    def end_session(self, session_key: int) -> None:
        """A conversation is over."""
        self.sessions.forget(session_key)

    def take_ended(self) -> list[Ended]:
        """What has ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def progress(self) -> Mapping[int, Segment]:
        """New tokens of each running answer; may be called from any thread."""
        with self._lock:
            return {answer.request.request_id: self.slots.segment(answer) for answer in self.slots.running()}

    # ------------------------------------------------------------------ a token boundary

    def refill(self) -> None:
        """Admit waiting answers into free rows, make the active rows a prefix, and bring them into order."""
        slots = self.slots
        if self.version >= 0 and self.is_admitting and len(self.scheduler):
            chosen = self.scheduler.take(slots.num_slots - slots.num_running)
            if chosen:
                self._admit([answer for answer in chosen if not self._is_ahead(answer)])
        if slots.num_running < slots.count:
            with self._lock:
                moves = slots.compaction()
            self._move(*moves)
        if slots.count and not self.counts["steps"] % LOOK_EVERY:
            self._order()

    def _order(self) -> None:
        """Bring rows into an order in which steps read less padding, where that pays."""
        decoder, slots = self.decoder, self.slots
        lengths_B = slots.positions_B + 1
        moves = moves_that_pay(lengths_B, decoder.cost, slots.max_context, decoder.max_moved_tokens)
        if moves is not None:
            with self._lock:
                slots.move(*moves)
            self._move(*moves)

    def _move(self, sources: list[int], targets: list[int]) -> None:
        """Keys and values follow their records."""
        if sources:
            self.decoder.move_rows(sources, targets, self.slots.positions_B[targets].tolist())
            self.counts["moved_rows"] += len(sources)
        self._plan = None

    def _is_ahead(self, answer: Answer) -> bool:
        """`stamped-versions`: an answer whose prefix is newer than these weights must not go on under them."""
        newest = answer.request.prefix.last_version
        if newest > self.version:
            error = EngineError(f"the prefix was sampled by version {newest}, the engine has {self.version}")
            self._ended.append((answer.ticket, error))
        return newest > self.version

    def _admit(self, answers: list[Answer]) -> None:
        rows = self.slots.holes()
        rows += range(self.slots.count, self.slots.count + len(answers) - len(rows))
        now_s = time.monotonic()
        with self._lock:
            for answer, row in zip(answers, rows, strict=False):
                answer.admitted_s, answer.paused_before_s = now_s, self.paused_s
                self.slots.place(answer, row, self.version)
        self._plan = None
        self._fill(answers, {answer: start for answer in answers if (start := self._go_on(answer))})

    def _go_on(self, answer: Answer) -> int:
        """How many tokens its row holds now, because the turn before was kept."""
        key = answer.request.session_key
        found = self.sessions.take(key, self.slots.context(answer)) if key >= 0 else None
        if found is None:
            return 0
        kept, num_tokens = found
        self.decoder.load_row(answer.row, kept.row, num_tokens)
        self.counts["kept_prefill_tokens"] += num_tokens
        return num_tokens

    def _keep(self, answer: Answer) -> None:
        """Its conversation may have another turn: keep the keys and values of its row, where there is room."""
        key, decoder = answer.request.session_key, self.decoder
        if key < 0 or not decoder.can_share:
            return
        tokens = self.slots.context(answer)
        num_bytes = len(tokens) * decoder.token_bytes
        if len(tokens) and self.sessions.make_room(key, num_bytes):
            self.sessions.keep(key, KeptRow(tokens, decoder.save_row(answer.row, len(tokens)), num_bytes))

    def _fill(self, answers: list[Answer], kept: Mapping[Answer, int] = MappingProxyType({})) -> None:
        """Bring rows up to all tokens but the newest; a prompt that a row holds under these weights is copied. `kept`:
        how many tokens rows hold already."""
        alone: list[Answer] = []
        shared: list[tuple[Answer, Answer]] = []
        for answer in sorted(answers, key=self.slots.length, reverse=True):  # the longest lend: they gain least
            may_borrow = self.decoder.can_share and answer not in kept and self._pays(answer)
            lender = self.scheduler.lender(answer) if may_borrow else None
            if lender is None:
                alone.append(answer)
                self.scheduler.lend(answer)
            else:
                shared.append((lender, answer))
        self._prefill(alone, [kept.get(answer, 0) for answer in alone])
        if not shared:
            return
        lenders, borrowers = zip(*shared, strict=True)
        lengths = [len(answer.request.prompt_P) - 1 for answer in borrowers]
        self.decoder.share_rows([one.row for one in lenders], [one.row for one in borrowers], lengths)
        self.counts["shared_prefill_tokens"] += sum(lengths)
        self._prefill(borrowers, lengths)
        for answer in borrowers:
            self.scheduler.lend(answer)

    def _pays(self, answer: Answer) -> bool:
        """Whether to borrow a prompt: attention from its end on sees every key, where a whole pass skips half."""
        prompt, rest = len(answer.request.prompt_P) - 1, self.slots.length(answer) - len(answer.request.prompt_P)
        return rest <= min(REST_PER_PROMPT * prompt, LONGEST_REST)

    def _prefill(self, answers: Sequence[Answer], starts: Sequence[int]) -> None:
        """From the position on from which a row holds nothing yet."""
        contexts = [self.slots.context(answer) for answer in answers]
        self.decoder.prefill([answer.row for answer in answers], contexts, starts)
        self.counts["prefill_tokens"] += sum(map(len, contexts)) - sum(starts)

    def step(self) -> None:
        """Sample one token for every active row."""
        slots = self.slots
        if self._plan is None:
            samplings = [answer.request.sampling for answer in slots.running()]
            self._plan = DrawPlan.of(samplings, self.vocab_size, self.device)
        logits = self.decoder.step(slots.tokens_B, slots.positions_B)
        random = torch.from_numpy(slots.uniforms_B()).to(self.device, non_blocking=True)
        tokens_B, logprobs_B = self._fetch(*draw(logits, self._plan, random))
        if not np.isfinite(logprobs_B).all():
            bad_rows = np.flatnonzero(~np.isfinite(logprobs_B)).tolist()
            logprobs_B = np.nan_to_num(logprobs_B, nan=0.0, neginf=0.0, posinf=0.0)
            self._fail_rows(bad_rows)
        with self._lock:
            ended = slots.record(tokens_B, logprobs_B)
        self.counts["steps"] += 1
        self.counts["tokens"] += len(tokens_B)
        if len(ended):
            for row in ended.tolist():
                answer = slots.answers[row]
                if answer is not None:
                    self._end(answer, slots.end_reason(row))

    def _fetch(self, tokens_B1: torch.Tensor, logprobs_B1: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """To the host, with one wait for the device."""
        if self.device.type == "cpu":
            return tokens_B1.numpy()[:, 0], logprobs_B1.numpy()[:, 0]
        both = torch.cat((tokens_B1.double(), logprobs_B1.double()), 1).cpu().numpy()
        return both[:, 0].astype(np.int64), both[:, 1].astype(np.float32)

    # ------------------------------------------------------------------ ends

    def _fail_rows(self, rows: list[int]) -> None:
        self.decoder.clear_rows(rows)
        for row in rows:
            answer = self.slots.answers[row]
            if answer is not None:
                error = PolicyDiverged(self.version, "its log-probs are not finite")
                self._ended.append((answer.ticket, error))
                self._release(answer)

    def _end(self, answer: Answer, reason: EndReason) -> None:
        if reason != "cancelled":
            self._keep(answer)
        now_s, paused_s = time.monotonic(), self.paused_s - answer.paused_before_s
        outcome = GenerationOutcome(
            request_id=answer.request.request_id,
            segment=self.slots.segment(answer),
            end_reason=reason,
            paused_s=paused_s,
            queue_s=answer.admitted_s - answer.submitted_s,
            generate_s=max(now_s - answer.admitted_s - paused_s, 0.0),
        )
        self._ended.append((answer.ticket, outcome))
        if self._tracer is not None and self._tracer.draws(answer.request.request_id):
            start_s, end_s = self._tracer.wall_s(answer.admitted_s), self._tracer.wall_s(now_s)
            self._tracer.complete(
                "generate", start_s, end_s, f"slot {answer.slot}",
                request=answer.request.request_id, tokens=len(outcome.segment), end=reason,
            )  # fmt: skip
        self._release(answer)

    def _release(self, answer: Answer) -> None:
        with self._lock:
            self.slots.release(answer)
        self.scheduler.recall(answer)
        self._plan = None

    # ------------------------------------------------------------------ versions

    def release(self) -> int:
        """Give the decoder's memory back: weights, the spare ones, keys and values; the bytes. All answers end."""
        if not self.has_memory:
            return 0
        self.cancel_all()
        num_bytes = self.decoder.num_bytes + self.sessions.num_bytes
        self.sessions.clear()
        self.scheduler.recall_all()
        self._plan = None
        del self.decoder
        self.version, self.has_memory = -1, False
        give_back(self.device)
        return num_bytes

    def take_memory(self) -> None:
        """Have a decoder again, without weights, if it was released."""
        if not self.has_memory:
            self.decoder, self.has_memory = self._make_decoder(), True

    def swap(self, version: int, interruption: Interruption) -> None:
        """Go over to the staged weights. Answers with tokens of a newer version (a rollback) end as `cancelled`."""
        for answer in self.slots.running():
            segment = self.slots.segment(answer)
            if max(segment.last_version, answer.request.prefix.last_version) > version:
                self._end(answer, "cancelled")
        self.decoder.swap()
        self.version = version
        self.counts["swaps"] += 1
        with self._lock:
            self.slots.begin_version(version)
        self.scheduler.recall_all()
        if interruption != "keep_kv":
            self.sessions.clear()
            self._fill(self.slots.running())
