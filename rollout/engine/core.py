"""The body of the generation loop: admit, step, swap, cancel. It runs in one thread, without asyncio.

It defines the order of operations at a token boundary, and the outcome of an ended answer. Threads and futures are in
embedded.py, the forward pass in the decoder.

Invariant between calls: for each running answer the cache contains every token except the newest, which is the input of
the next step. So a new prompt, a continued answer and a prefill after a swap are the same operation: prefill all tokens
except the last, minus those that can be copied from a row of the same group, or that were kept from the previous turn
of the conversation.
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
from rollout.engine.adapter_layout import BASE
from rollout.engine.decoder import Decoder
from rollout.engine.device import give_back
from rollout.engine.port import EndReason, GenerationOutcome
from rollout.engine.row_order import LOOK_EVERY, moves_that_pay
from rollout.engine.sampler import DrawPlan, draw
from rollout.engine.scheduler import Scheduler
from rollout.engine.sessions import KeptRow, Sessions
from rollout.engine.slots import Answer, Slots

REST_PER_PROMPT = 2
"""Number of tokens after a prompt, relative to the prompt's length, up to which a continued answer copies the prompt
from another row."""
LONGEST_REST = 1024
"""Largest number of tokens after any prompt: the attention mask has the size [tokens, tokens and prompt]."""
Ended = tuple[int, GenerationOutcome | EngineError]
"""Ticket and outcome."""


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
        has_adapters: bool = False,
        frozen: str = "",
    ) -> None:
        """`make_decoder` allocates a decoder's memory: now if `has_memory`, and again after each release.
        `session_bytes`: memory for keys and values of conversations between their turns. `has_adapters`: answers may
        name an adapter of the decoder. `frozen`: what errors call a model that is not trained; empty for the policy."""
        self._make_decoder, self.device, self._tracer = make_decoder, device, tracer
        self.vocab_size, self.has_memory = vocab_size, has_memory
        self.on_pass: Callable[[], None] = lambda: None
        """Called in each pass of a prefill: a token boundary with long prompts has many."""
        if has_memory:
            self.decoder = self._made_decoder()
        self.slots, self.scheduler = Slots(num_slots, max_context), Scheduler(num_slots)
        self.sessions = Sessions(session_bytes)
        self._has_adapters, self._frozen = has_adapters, frozen
        self.version = -1
        self.is_admitting = True
        self.paused_s = 0.0
        """Total time for which generation was paused; the owner adds to it."""
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
        """Cancel a waiting or running answer; unknown tickets (it has just ended) are ignored."""
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
        """End a conversation."""
        self.sessions.end(session_key)

    def take_ended(self) -> list[Ended]:
        """Answers that have ended since the last call."""
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
        """Reorder rows so that steps read less padding, if that pays."""
        decoder, slots = self.decoder, self.slots
        lengths_B = slots.positions_B + 1
        moves = moves_that_pay(lengths_B, decoder.cost, slots.max_context, decoder.max_moved_tokens)
        if moves is not None:
            with self._lock:
                slots.move(*moves)
            self._move(*moves)

    def _move(self, sources: list[int], targets: list[int]) -> None:
        """Move records, and with them keys and values."""
        if sources:
            self.decoder.move_rows(sources, targets, self.slots.positions_B[targets].tolist())
            self.counts["moved_rows"] += len(sources)
        self._plan = None

    def _is_ahead(self, answer: Answer) -> bool:
        """Reject an answer whose prefix is newer than these weights (`stamped-versions`)."""
        newest = answer.request.prefix.last_version
        if newest > self.version:
            error = EngineError(
                f"the answer so far was sampled by version {newest}, which is newer than version "
                f"{self.version} of the engine"
            )
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
        self._fill(answers, {answer: start for answer in answers if (start := self._restore_kept(answer))})

    def _restore_kept(self, answer: Answer) -> int:
        """Restore the kept row of the previous turn; returns the number of tokens that the row then contains."""
        key = answer.request.session_key, answer.adapter
        found = self.sessions.take(key, self.slots.context(answer)) if key[0] >= 0 else None
        if found is None:
            return 0
        kept, num_tokens = found
        self.decoder.load_row(answer.row, kept.row, num_tokens)
        self.counts["kept_prefill_tokens"] += num_tokens
        return num_tokens

    def _keep(self, answer: Answer) -> None:
        """Keep the keys and values of its row for another turn of its conversation, if there is room."""
        key, decoder = (answer.request.session_key, answer.adapter), self.decoder
        if key[0] < 0 or not decoder.can_share:
            return
        tokens = self.slots.context(answer)
        num_bytes = len(tokens) * decoder.token_bytes
        if len(tokens) and self.sessions.make_room(key, num_bytes):
            self.sessions.keep(key, KeptRow(tokens, decoder.save_row(answer.row, len(tokens)), num_bytes))

    def _fill(self, answers: list[Answer], kept: Mapping[Answer, int] = MappingProxyType({})) -> None:
        """Prefill rows up to all tokens except the newest; a prompt that a row contains under these weights is copied.
        `kept`: number of tokens that rows contain already."""
        alone: list[Answer] = []
        shared: list[tuple[Answer, Answer]] = []
        for answer in sorted(
            answers, key=self.slots.length, reverse=True
        ):  # the longest are copied from: they gain least
            may_borrow = self.decoder.can_share and answer not in kept and self._pays(answer)
            owner = self.scheduler.prompt_owner(answer) if may_borrow else None
            if owner is None:
                alone.append(answer)
                self.scheduler.share_prompt(answer)
            else:
                shared.append((owner, answer))
        self._prefill(alone, [kept.get(answer, 0) for answer in alone])
        if not shared:
            return
        owners, receivers = zip(*shared, strict=True)
        lengths = [len(answer.request.prompt_P) - 1 for answer in receivers]
        self.decoder.share_rows([one.row for one in owners], [one.row for one in receivers], lengths)
        self.counts["shared_prefill_tokens"] += sum(lengths)
        self._prefill(receivers, lengths)
        for answer in receivers:
            self.scheduler.share_prompt(answer)

    def _pays(self, answer: Answer) -> bool:
        """Whether copying a prompt pays: attention from its end on sees every key, while a whole pass skips half."""
        prompt, rest = len(answer.request.prompt_P) - 1, self.slots.length(answer) - len(answer.request.prompt_P)
        return rest <= min(REST_PER_PROMPT * prompt, LONGEST_REST)

    def _prefill(self, answers: Sequence[Answer], starts: Sequence[int]) -> None:
        """Prefill answers from the first position that a row does not contain.

        With one slot the tokens of a continued answer are repeated as the steps that sampled them: a prefill rounds
        differently, and then an interrupted answer ends with the same bits as any other.
        """
        contexts = [self.slots.context(answer) for answer in answers]
        ends = [len(context) for context in contexts]
        if self.slots.num_slots == 1:
            ends = [min(end, len(one.request.prompt_P) - 1) for one, end in zip(answers, ends, strict=True)]
        adapters = np.array([answer.adapter for answer in answers], np.int64) if self._has_adapters else None
        prompts = [context[:end] for context, end in zip(contexts, ends, strict=True)]
        self.decoder.prefill([answer.row for answer in answers], prompts, starts, adapters)
        for context, end, start in zip(contexts, ends, starts, strict=True):
            for position in range(max(end, start), len(context)):
                self.on_pass()
                token_B = context[position : position + 1].astype(np.int64)
                self.decoder.step(token_B, np.array([position], np.int64), adapters)
        self.counts["prefill_tokens"] += sum(map(len, contexts)) - sum(starts)

    def step(self) -> None:
        """Sample one token for every active row."""
        slots = self.slots
        if self._plan is None:
            samplings = [answer.request.sampling for answer in slots.running()]
            self._plan = DrawPlan.of(samplings, self.vocab_size, self.device)
        adapters_B = slots.adapters_B if self._has_adapters else None
        logits = self.decoder.step(slots.tokens_B, slots.positions_B, adapters_B)
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
        """Copy to the host, with one wait for the device."""
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
                self._ended.append((answer.ticket, self._not_finite(answer)))
                self._release(answer)

    def _not_finite(self, answer: Answer) -> EngineError:
        """The error of an answer whose log-probs are not finite: only the policy can have diverged."""
        if answer.adapter == BASE and not self._frozen:
            return PolicyDiverged(self.version, "its log-probs are not finite")
        whose = self._frozen if answer.adapter == BASE else f"adapter {answer.request.adapter}"
        return EngineError(f"the log-probs of {whose} are not finite -> check the weights and the dtype of this model")

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
        self.scheduler.unshare_prompt(answer)
        self._plan = None

    # ------------------------------------------------------------------ versions

    def release(self) -> int:
        """Release the decoder's memory (weights, spare weights, keys and values) and return the number of bytes. All
        answers end."""
        if not self.has_memory:
            return 0
        self.cancel_all()
        num_bytes = self.decoder.num_bytes + self.sessions.num_bytes
        self.sessions.clear()
        self.scheduler.unshare_all()
        self._plan = None
        del self.decoder
        self.version, self.has_memory = -1, False
        give_back(self.device)
        return num_bytes

    def take_memory(self) -> None:
        """Allocate a decoder again, without weights, if it was released."""
        if not self.has_memory:
            self.decoder, self.has_memory = self._made_decoder(), True

    def _made_decoder(self) -> Decoder:
        decoder = self._make_decoder()
        decoder.on_pass = lambda: self.on_pass()
        return decoder

    def swap(self, version: int, interruption: Interruption) -> None:
        """Switch to the staged weights. Answers with tokens of a newer version (a rollback) end as `cancelled`."""
        for answer in self.slots.running():
            segment = self.slots.segment(answer)
            if max(segment.last_version, answer.request.prefix.last_version) > version:
                self._end(answer, "cancelled")
        self.decoder.swap()
        self.version = version
        self.counts["swaps"] += 1
        with self._lock:
            self.slots.begin_version(version)
        self.scheduler.unshare_all()
        if interruption != "keep_kv":
            self.sessions.clear()
            self._fill(self.slots.running())
