"""`python -m rollout.regenerate --spec FILE`: draws recorded answers again, for `areal-like replay --engine`.

It computes the logits of each recorded token from the tokens before it in one pass, and draws with the embedded
engine's own sampler and the number that the engine used. By induction over the tokens the regenerated answer is the
recorded one if every token is: no token has to wait for the one before it.

Names of order files (`VersionOrder`) are read from stdin, one a line. Each answer is a line on stdout: the first says
on which device it computes, and each further one that the result of an order is in the file `NAME.out`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from areal_like import quick_exit
from areal_like.device_names import names_gpu
from areal_like.errors import UserError, WeightError
from areal_like.process import run_blocking
from areal_like.regenerate_files import (
    INTEGERS,
    REALS,
    WIDE_REALS,
    AnswerSpan,
    Regenerated,
    RegenerateSpec,
    SampledTokens,
    VersionOrder,
)
from areal_like.trajectory import Segment
from areal_like.wire.messages import Sampling
from rollout.answering import STOPS, call_sampling, end_of, turn_seed
from rollout.config import RolloutSettings
from rollout.engine.frozen import folder_tensors
from rollout.engine.loading import DTYPES
from rollout.engine.making import make_core
from rollout.engine.requests import check_tokens
from rollout.engine.sampler import DrawPlan, redraw, uniforms
from rollout.engine.scoring import CHUNK
from rollout.tokens import PromptTokens, load_tokenizer, stop_ids, stop_strings


class Regenerator:
    """The model and the sampler of a worker, without its engine thread. Raises UserError: the model cannot be used."""

    def __init__(self, spec: RegenerateSpec) -> None:
        worker, settings = spec.worker, RolloutSettings.model_validate(spec.worker.settings)
        assert worker.model.path is not None
        model_dir = Path(worker.model.path)
        self.device = _device(settings.engine.device)
        engine = settings.engine.model_copy(update={"device": self.device, "num_slots": 1, "session_cache_mb": 0.0})
        self._published = DTYPES[worker.model.dtype]
        self._core = make_core(
            model_dir, engine, DTYPES[engine.dtype or worker.model.dtype], num_threads=spec.num_threads, tracer=None,
            has_spare=False,
        )  # fmt: skip
        tokenizer = load_tokenizer(model_dir, worker.model.tokenizer)
        self._tokens = PromptTokens(
            tokenizer, template=settings.prompt_template, add_bos=settings.add_bos,
            max_context=self._core.slots.max_context, stop_ids=stop_ids(model_dir, tokenizer),
        )  # fmt: skip

    def run(self, order: VersionOrder) -> list[Regenerated]:
        """Results of an order's sequences. Raises UserError: no such model, or weights of another one."""
        with torch.inference_mode():
            try:
                self._core.decoder.stage(folder_tensors(Path(order.model_dir), self._published), order.version)
            except WeightError as error:
                remedy = "restore the model and the checkpoints of the run"
                raise UserError(f"the weights do not fit the model of the run: {error}", remedy=remedy) from error
            self._core.decoder.swap()
            plan = DrawPlan.of([order.sampling], self._core.vocab_size, self._core.device)
            return [self._sequence(one, plan, order.sampling) for one in order.sequences]

    def _sequence(self, sequence: SampledTokens, plan: DrawPlan, sampling: Sampling) -> Regenerated:
        tokens_T = np.frombuffer(sequence.tokens_T, INTEGERS).astype(np.int64)
        check_tokens(tokens_T, self._core.vocab_size)
        if len(tokens_T) > self._core.slots.max_context:
            what = (
                f"a recorded answer has {len(tokens_T)} tokens with its prompt, but the context of the model is "
                f"limited to {self._core.slots.max_context} tokens"
            )
            raise UserError(what, where="rollout.engine.max_context", remedy="restore the model of the run")
        stop = max(span.start + span.length for span in sequence.spans)
        logits_of = self._core.decoder.logits(tokens_T[:stop])
        parts = [self._span(logits_of, tokens_T, span, sequence.seed, plan) for span in sequence.spans]
        drawn_N, logprobs_N, margins_N = (torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True))
        return Regenerated(
            logprobs_N=logprobs_N.astype(REALS).tobytes(),
            drawn_N=drawn_N.astype(INTEGERS).tobytes(),
            margins_N=margins_N.astype(WIDE_REALS).tobytes(),
            end="" if sequence.end is None else self._end(tokens_T, sequence, sampling),
        )

    def _span(
        self, logits_of: Callable[[slice], Tensor], tokens_T: np.ndarray, span: AnswerSpan, seed: int, plan: DrawPlan
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Drawn tokens, log-probs of the recorded ones, and margins, each [length]."""
        stream_N = uniforms(turn_seed(seed, span.turn), span.position, span.length)
        drawn, device = [], self._core.device
        for begin in range(0, span.length, CHUNK):
            end = min(begin + CHUNK, span.length)
            logits = logits_of(slice(span.start + begin - 1, span.start + end - 1))
            recorded = torch.from_numpy(tokens_T[span.start + begin : span.start + end, None]).to(device)
            drawn.append(redraw(logits, plan, torch.from_numpy(stream_N[begin:end]).to(device), recorded))
        tokens, logprobs, margins = (torch.cat(column)[:, 0] for column in zip(*drawn, strict=True))
        return tokens, logprobs, margins

    def _end(self, tokens_T: np.ndarray, sequence: SampledTokens, sampling: Sampling) -> str:
        """Why the answer cannot have ended where and as it is recorded; empty if it can."""
        (first, *_), sampled = sequence.spans, call_sampling(sampling, self._tokens.stop_ids)
        num_prompt = first.start - first.position
        tokens_R = tokens_T[num_prompt:].astype(np.int32)
        stops = stop_strings(self._tokens, sampling)
        ends = np.flatnonzero(np.isin(tokens_R, sampled.stop_token_ids)).tolist()
        lengths = [place + 1 for place in ends] + ([] if stops is None else [stops.end(tokens_R, 0) or len(tokens_R)])
        if min(lengths, default=len(tokens_R)) < len(tokens_R):
            return f"the answer continues after token {min(lengths)}, which ends it"
        answer = Segment(tokens_R, np.zeros(len(tokens_R), np.float32), np.zeros(len(tokens_R), np.int32))
        ended_by = end_of(
            answer, sampled, num_prompt, end_ids=self._tokens.stop_ids, max_context=self._core.slots.max_context,
            stops=stops,
        )  # fmt: skip
        if ended_by is None:
            return f"the answer ends after {len(tokens_R)} tokens, where neither a stop token nor a limit ends it"
        found = "stop" if ended_by in STOPS else "length"
        return "" if found == sequence.end else f"the finish reason is {found}, not {sequence.end}"


def _device(configured: str) -> str:
    """The device on which the run's engine computed, if it is here; otherwise the CPU."""
    return configured if names_gpu(configured) and torch.cuda.is_available() else "cpu"


def main(spec: RegenerateSpec) -> None:
    """Run the process. Only answers go to stdout: what libraries print goes to stderr."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1) as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        regenerator = Regenerator(spec)
        print(json.dumps({"device": regenerator.device}), file=answers, flush=True)
        for line in sys.stdin:
            source = Path(line.rstrip("\n"))
            order = msgspec.msgpack.decode(source.read_bytes(), type=VersionOrder)
            found = regenerator.run(order)
            source.with_suffix(".out").write_bytes(msgspec.msgpack.encode(found))
            print(json.dumps({"version": order.version}), file=answers, flush=True)


if __name__ == "__main__":
    quick_exit.run(lambda: run_blocking(RegenerateSpec, main))
