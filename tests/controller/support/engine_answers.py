"""Answers of the embedded engine's core for a run of replayable_run.py, with versions that change within answers.

`engine_here` replaces controller.runs.replay.engine_process.open_engine: the same code, without a process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from replayable_run import GROUP_SIZE, MAX_NEW_TOKENS, prompt_of

from areal_like.regenerate_files import Regenerated, RegenerateSpec, VersionOrder
from areal_like.trajectory import Segment, Trajectory
from areal_like.wire.messages import Sampling
from controller.runtime.outbound import stream_seed
from rollout.answering import answer_of, end_of, turn_seed
from rollout.config import EngineSettings, Interruption
from rollout.engine.core import GenerationCore
from rollout.engine.making import make_core
from rollout.engine.port import GenerationRequest
from rollout.engine.slots import Answer
from rollout.regenerate import Regenerator
from rollout.transcript import Transcript

RUN_SEED, END = 1, 2
ENGINE: Mapping[str, Any] = {"num_slots": GROUP_SIZE, "max_context": 128, "device": "cpu"}
TOKENS_BEFORE_SWAP = 3
SAMPLING = Sampling(max_new_tokens=MAX_NEW_TOKENS, stop_token_ids=(END,))


class EngineAnswers:
    """Samples each group with four slots; a new version is swapped in after every three tokens, up to the newest.

    num_turns: answers of a sample, with given tokens between them; with more than one, answers have numbers.
    """

    def __init__(self, model_dir: Path, *, interruption: Interruption = "recompute", num_turns: int = 1) -> None:
        self._model_dir, self._interruption, self._num_turns = model_dir, interruption, num_turns
        self._weights: dict[int, dict[str, torch.Tensor]] = {}
        self._core: GenerationCore | None = None
        self._made: dict[int, list[Trajectory]] = {}

    def take(self, version: int, weights: Mapping[str, torch.Tensor]) -> None:
        self._weights[version] = {name: one.detach().clone() for name, one in weights.items()}

    def __call__(self, group_id: int, index: int, step: int) -> Trajectory:
        if group_id not in self._made:
            with torch.inference_mode():
                self._made[group_id] = self._group(group_id, max(0, step - 1 - group_id % 3), step - 1)
        return self._made[group_id][index]

    def _group(self, group_id: int, first: int, last: int) -> list[Trajectory]:
        if self._core is None:
            settings = EngineSettings.model_validate(ENGINE)
            self._core = make_core(self._model_dir, settings, torch.float32, num_threads=1, tracer=None)
        self._swap(first)
        transcripts = [Transcript(prompt_of(group_id)) for _ in range(GROUP_SIZE)]
        for turn in range(self._num_turns):
            for transcript in transcripts if turn else ():
                transcript.given([5, 6, 7 + turn])
            segments = self._turn(group_id, turn, transcripts, last)
            for transcript, segment in zip(transcripts, segments, strict=True):
                number = turn if self._num_turns > 1 else -1
                ended_by = end_of(segment, SAMPLING, 4, end_ids=(END,), max_context=128)
                assert ended_by is not None, "the engine ended it"
                transcript.sampled(answer_of(segment, ended_by, number=number, is_trainable=True))
        return [one.close() for one in transcripts]

    def _turn(self, group_id: int, turn: int, transcripts: list[Transcript], last: int) -> list[Segment]:
        core = self._core
        assert core is not None
        for index, transcript in enumerate(transcripts):
            seed = turn_seed(stream_seed(RUN_SEED, "train", group_id, index), turn)
            request = GenerationRequest(
                request_id=index, prompt_P=transcript.tokens_T, prefix=Segment.empty(), sampling=SAMPLING,
                seed=seed, share_key=-1 if turn else group_id,
            )  # fmt: skip
            core.submit(Answer(index, request, np.array([END]), 0.0))
        found: dict[int, Segment] = {}
        while len(found) < len(transcripts):
            for _ in range(TOKENS_BEFORE_SWAP):
                core.refill()
                if core.slots.count:
                    core.step()
            found |= {ticket: outcome.segment for ticket, outcome in core.take_ended()}  # type: ignore[union-attr]
            if core.version < last:
                self._swap(core.version + 1)
        return [found[index] for index in range(len(transcripts))]

    def _swap(self, version: int) -> None:
        assert self._core is not None
        self._core.decoder.stage(self._weights[version], version)
        self._core.swap(version, self._interruption)


class EngineHere:
    """Computes the results of orders in this process."""

    def __init__(self, spec: RegenerateSpec) -> None:
        self._regenerator = Regenerator(spec)
        self.device = self._regenerator.device

    def run(self, order: VersionOrder) -> list[Regenerated]:
        """As the process, with the same encoding."""
        read = msgspec.msgpack.decode(msgspec.msgpack.encode(order), type=VersionOrder)
        encoded = msgspec.msgpack.encode(self._regenerator.run(read))
        return msgspec.msgpack.decode(encoded, type=list[Regenerated])


@contextmanager
def engine_here(spec: RegenerateSpec, home: Path, scratch: Path) -> Iterator[EngineHere]:
    """See above."""
    yield EngineHere(RegenerateSpec.model_validate_json(spec.model_copy(update={"num_threads": 1}).model_dump_json()))
