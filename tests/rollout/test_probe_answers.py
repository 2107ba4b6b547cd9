"""Answers for the probe with a scripted engine: which requests it gets, and what is said about the answers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_tokenizer import byte_tokenizer

from areal_like.errors import UserError
from areal_like.probe_files import ProbeAnswers, ProbeSpec
from areal_like.trajectory import Segment
from areal_like.wire.messages import Sampling
from rollout import probe_answers
from rollout.engine.port import GenerationOutcome, GenerationRequest
from rollout.probe_answers import answers_to, special_ids

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Engine:
    """Answers each request with the next line; an exception is raised."""

    def __init__(self, tokenizer: Any, *lines: Any) -> None:
        self.tokenizer, self.lines = tokenizer, list(lines)
        self.requests: list[GenerationRequest] = []
        self.calls: list[Any] = []

    async def start(self) -> None:
        self.calls.append("start")

    async def load_version(self, manifest: Path, interruption: str) -> None:
        self.calls.append((manifest, interruption))

    async def generate(self, request: GenerationRequest) -> GenerationOutcome:
        self.requests.append(request)
        line = self.lines.pop(0) if self.lines else "7<|im_end|>"
        if isinstance(line, Exception):
            raise line
        tokens = self.tokenizer.encode(line, add_special_tokens=False) if isinstance(line, str) else line
        count = len(tokens)
        segment = Segment(np.array(tokens, np.int32), np.full(count, -0.5, np.float32), np.zeros(count, np.int32))
        has_ended = tokens[-1] == self.tokenizer.eos_token_id
        return GenerationOutcome(
            request_id=request.request_id, segment=segment, end_reason="stop" if has_ended else "length", generate_s=0.1
        )

    async def close(self) -> None:
        self.calls.append("close")


class Probe:
    """A model folder, a tokenizer and what an order asks for."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **config: Any) -> None:
        self.tokenizer = byte_tokenizer(TEMPLATE)
        self.eos = self.tokenizer.eos_token_id
        self.folder = folder
        (folder / "config.json").write_text(json.dumps({"vocab_size": 1000, "eos_token_id": self.eos, **config}))
        monkeypatch.setattr(probe_answers, "load_tokenizer", lambda model_dir, name: self.tokenizer)

    def ask(self, *lines: Any, sampling: Any = None, **order: Any) -> tuple[ProbeAnswers, Engine]:
        engine = Engine(self.tokenizer, *lines)
        facts = {
            "model_dir": str(self.folder), "tokenizer": "from_model", "dtype": "float32", "manifest": "/v0.json",
            "settings": {}, "sampling": sampling or Sampling(max_new_tokens=4), "rows": [{"prompt": "a"}],
            "num_samples": 1, "seed": 3, "num_threads": 1, "startup_timeout_s": 5.0, **order,
        }  # fmt: skip
        return asyncio.run(answers_to(ProbeSpec(**facts), engine)), engine  # type: ignore[arg-type]


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Probe:
    return Probe(tmp_path, monkeypatch)


def test_each_row_is_sampled_with_seeds_of_its_own(probe: Probe) -> None:
    found, engine = probe.ask("7<|im_end|>", "8", rows=[{"prompt": "a"}, {"prompt": "b"}], num_samples=2)
    assert [request.request_id for request in engine.requests] == [1, 2, 3, 4]
    assert [request.seed for request in engine.requests] == [3_000_009, 3_000_010, 3_000_011, 3_000_012]
    assert [request.share_key for request in engine.requests] == [0, 0, 1, 1]
    assert [answer.row for answer in found.answers] == [0, 0, 1, 1]
    first, second = found.answers[:2]
    assert (first.text, first.is_cut, second.text, second.is_cut) == ("7", False, "8", True)
    assert first.tokens_R == probe.tokenizer.encode("7<|im_end|>")
    assert first.logprobs_R == [-0.5, -0.5]
    assert first.prompt_P == engine.requests[0].prompt_P.tolist()
    assert found.prompts == [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in ("a", "b")]
    assert engine.calls == ["start", (Path("/v0.json"), "recompute"), "close"]


def test_facts_of_tokenizer_and_model_are_reported(probe: Probe) -> None:
    found, _ = probe.ask()
    assert (found.stop_tokens, found.are_stops_ordinary, found.has_chat_template) == (["<|im_end|>"], False, True)
    assert (found.tokenizer_size, found.vocab_size) == (len(probe.tokenizer), 1000)
    assert (found.outside_model, found.outside_tokenizer, found.passed_over) == (0, 0, {})
    assert (found.unknown_marks, found.rejected) == ([], {})


@pytest.mark.parametrize(
    ("config", "vocab_size"),
    [({"vocab_size": None, "text_config": {"vocab_size": 900}}, 900), ({"vocab_size": None}, 0),
     ({"vocab_size": None, "text_config": {}}, 0)],
)  # fmt: skip
def test_vocabulary_is_that_of_the_text_model_where_there_are_several(
    config: Any, vocab_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Probe(tmp_path, monkeypatch, **config).ask()[0].vocab_size == vocab_size


def test_stop_token_that_is_text_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Probe(tmp_path, monkeypatch)
    ordinary = probe.tokenizer.encode("x")[0]
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 1000, "eos_token_id": [ordinary]}))
    assert probe.ask()[0].are_stops_ordinary
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 1000, "eos_token_id": [ordinary, probe.eos]}))
    assert not probe.ask()[0].are_stops_ordinary


def test_tokenizer_without_any_stop_has_none_that_is_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Probe(tmp_path, monkeypatch, eos_token_id=None)
    monkeypatch.setattr(probe_answers, "stop_ids", lambda model_dir, tokenizer: ())
    found, engine = probe.ask()
    assert (found.stop_tokens, found.are_stops_ordinary) == ([], False)
    assert engine.requests[0].sampling.stop_token_ids == ()


@pytest.mark.parametrize(
    ("sampling", "stops"),
    [
        (Sampling(max_new_tokens=4), ("eos",)),
        (Sampling(max_new_tokens=4, stop_token_ids=(5, 6)), (5, 6, "eos")),
        (Sampling(max_new_tokens=4, stop_token_ids=(5,), ignore_eos=True), ()),
    ],
)
def test_answers_end_as_those_of_the_run(probe: Probe, sampling: Sampling, stops: tuple[Any, ...]) -> None:
    _, engine = probe.ask(sampling=sampling)
    expected = tuple(probe.eos if one == "eos" else one for one in stops)
    assert engine.requests[0].sampling.stop_token_ids == expected
    assert engine.requests[0].sampling.max_new_tokens == 4


def test_rows_that_cannot_become_prompts_are_reported_and_the_others_sampled(probe: Probe) -> None:
    found, engine = probe.ask(rows=[{"prompt": " "}, {"prompt": "b"}], num_samples=3)
    assert list(found.rejected) == [0]
    assert "the prompt is empty" in found.rejected[0]
    assert [answer.row for answer in found.answers] == [1, 1, 1]
    assert [request.request_id for request in engine.requests] == [4, 5, 6]


def test_without_a_prompt_no_engine_is_started(probe: Probe) -> None:
    found, engine = probe.ask(rows=[{"prompt": " "}])
    assert (found.answers, engine.calls) == ([], [])


def test_prompt_with_a_token_that_the_model_lacks_is_not_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = Probe(tmp_path, monkeypatch)
    largest = max(probe.tokenizer.encode("<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"))
    for vocab_size, num_outside in ((largest + 1, 0), (largest, 1)):
        (tmp_path / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
        found, engine = probe.ask(rows=[{"prompt": "b"}])
        assert (found.outside_model, len(engine.requests)) == (num_outside, 1 - num_outside)
        assert len(found.prompts) == 1


def test_marks_that_are_no_token_are_reported_once(probe: Probe) -> None:
    row = {"prompt": "<|eot_id|> <start_of_turn> <|im_end|> <|eot_id|> <|a b|>"}
    assert probe.ask(rows=[row, row])[0].unknown_marks == ["<start_of_turn>", "<|eot_id|>"]


def test_special_tokens_inside_an_answer_are_counted_by_answer(probe: Probe) -> None:
    found, _ = probe.ask("<|im_start|>a<|im_start|><|im_end|>", "<|im_start|>", "a<|im_end|>b", num_samples=3)
    assert found.passed_over == {"<|im_start|>": 2, "<|im_end|>": 1}


def test_answers_with_a_token_that_the_tokenizer_lacks_are_counted(probe: Probe) -> None:
    size = len(probe.tokenizer)
    found, _ = probe.ask([size, size + 1], [size - 1], num_samples=2)
    assert found.outside_tokenizer == 1


def test_special_tokens_without_a_role_are_special(probe: Probe) -> None:
    found = special_ids(probe.tokenizer)
    assert {probe.eos, probe.tokenizer.convert_tokens_to_ids("<|im_start|>")} <= found
    assert probe.tokenizer.convert_tokens_to_ids("<think>") not in found


def test_mistake_that_an_engine_finds_is_one_error_and_the_engine_is_closed(probe: Probe) -> None:
    engines: list[Engine] = []
    init = Engine.__init__

    def kept(self: Engine, *given: Any) -> None:
        init(self, *given)
        engines.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "__init__", kept)
        with pytest.raises(UserError, match="does not fit"):
            probe.ask(UserError("does not fit"), UserError("does not fit"), num_samples=2)
    assert engines[0].calls[-1] == "close"
