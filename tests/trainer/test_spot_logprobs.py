"""Log-probs of spot checks are those of the trainer's own passes, at the sampled tokens of a trajectory."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from areal_like.probe_files import LogprobSpec
from areal_like.spot_files import SpotSpec
from trainer.probe_logprobs import logprobs_of as trainers_logprobs
from trainer.spot_logprobs import logprobs_of

PROMPT, ANSWER = [4, 9, 7], [11, 5, 30]


def spec(folder: Path, mask: list[bool], dtype: str = "float32") -> SpotSpec:
    return SpotSpec(
        model_dir=str(folder), dtype=dtype, temperature=0.7, num_threads=1, sequences=[(PROMPT + ANSWER, mask)]  # type: ignore[arg-type]
    )  # fmt: skip


def test_sampled_tokens_have_the_log_probs_of_the_trainer(prepared: Path) -> None:
    (found,) = logprobs_of(spec(prepared, [False] * 3 + [True] * 3))
    (wanted,) = trainers_logprobs(
        LogprobSpec(
            model_dir=str(prepared), device="cpu", attention="sdpa", precision="float32", temperature=0.7,
            num_threads=1, sequences=[(PROMPT, ANSWER)],
        )
    )  # fmt: skip
    assert found == pytest.approx(wanted, abs=1e-5)
    (some,) = logprobs_of(spec(prepared, [False, False, False, True, False, True]))
    assert some == pytest.approx([found[0], found[2]], abs=1e-6)


def test_weights_are_rounded_to_the_type_that_was_published(prepared: Path) -> None:
    mask = [False] * 3 + [True] * 3
    (exact,), (half,) = logprobs_of(spec(prepared, mask)), logprobs_of(spec(prepared, mask, "bfloat16"))
    assert max(abs(a - b) for a, b in zip(exact, half, strict=True)) > 1e-4
    assert all(math.isfinite(value) for value in half)
