"""`python -m rollout.probe_answers IN OUT`: samples answers of the starting model, for `areal-like probe`.

Prompts and samples come from the run's own tokenizer rules and engine; the process also collects facts that need a
tokenizer. The findings are in controller/probe/findings.py.

IN is a `ProbeSpec`, OUT a `ProbeAnswers` (areal_like/probe_files.py). P: tokens of a prompt.
"""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from areal_like import quick_exit
from areal_like.config import TraceSettings
from areal_like.errors import UserError
from areal_like.probe_files import ProbeAnswer, ProbeAnswers, ProbeSpec, run_spec
from areal_like.trace import Tracer
from areal_like.trajectory import Segment
from rollout.config import RolloutSettings
from rollout.engine.descriptor import EngineContext
from rollout.engine.port import Engine, GenerationRequest
from rollout.engine.registry import find_engine, make_engine
from rollout.tokens import PromptTokens, load_tokenizer, stop_ids, stop_strings

MARK = re.compile(r"<\|[^|<>\s]{1,40}\|>|<(?:start|end)_of_turn>|<｜[^｜<>]{1,40}｜>")
"""Markers of turns in chat templates. A tokenizer of the same family has one token for each."""


async def answers_to(order: ProbeSpec, engine: Engine | None = None, scratch: Path | None = None) -> ProbeAnswers:
    """Sample `num_samples` answers to each row, with `engine` or with the engine that the settings name. Raises
    UserError.

    scratch: folder for the engine's logs; None: the system's temporary folder.
    """
    settings = RolloutSettings.model_validate(order.settings)
    model_dir = Path(order.model_dir)
    tokenizer = load_tokenizer(model_dir, order.tokenizer)
    tokens = PromptTokens(
        tokenizer, template=settings.prompt_template, add_bos=settings.add_bos,
        max_context=settings.engine.max_context, stop_ids=stop_ids(model_dir, tokenizer),
    )  # fmt: skip
    known = ProbeAnswers(
        stop_tokens=[str(tokenizer.convert_ids_to_tokens(one)) for one in tokens.stop_ids],
        are_stops_ordinary=bool(tokens.stop_ids) and not set(tokens.stop_ids) & special_ids(tokenizer),
        has_chat_template=bool(getattr(tokenizer, "chat_template", None)),
        tokenizer_size=len(tokenizer),
        vocab_size=_vocab_size(model_dir),
    )
    prompts, known = _prompts(order, tokens, tokenizer, known)
    if not prompts:
        return known
    with tempfile.TemporaryDirectory(prefix="areal_like-probe-", dir=scratch) as folder:
        made = engine or make_engine(find_engine(settings.engine.kind), _context(order, settings, Path(folder)))
        try:
            await made.start()
            await made.load_version(Path(order.manifest), settings.interruption)
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(_answer(made, order, tokens, index, prompt_P, sample))
                    for index, prompt_P in prompts.items()
                    for sample in range(order.num_samples)
                ]
        except* UserError as group:
            raise _first(group) from group
        finally:
            await made.close()
    return _with_answers(known, tokenizer, [task.result() for task in running])


def _first(group: BaseExceptionGroup[UserError]) -> UserError:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


def _prompts(
    order: ProbeSpec, tokens: PromptTokens, tokenizer: Any, known: ProbeAnswers
) -> tuple[dict[int, np.ndarray], ProbeAnswers]:
    """Prompts [P] by row, for the rows that the model can use, and the facts about all rows."""
    prompts: dict[int, np.ndarray] = {}
    rejected: dict[int, str] = {}
    texts: list[str] = []
    for index, row in enumerate(order.rows):
        try:
            prompts[index] = tokens.prompt(row)
        except UserError as error:
            rejected[index] = str(error)
            continue
        ids = prompts[index].tolist()
        texts.append(str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)))
    marks = {mark for text in texts for mark in MARK.findall(text)}
    fitting = {
        index: prompt_P
        for index, prompt_P in prompts.items()
        if not known.vocab_size or int(prompt_P.max()) < known.vocab_size
    }
    known = msgspec.structs.replace(
        known, prompts=texts, rejected=rejected, outside_model=len(prompts) - len(fitting),
        unknown_marks=sorted(mark for mark in marks if not _is_one_token(tokenizer, mark)),
    )  # fmt: skip
    return fitting, known


def special_ids(tokenizer: Any) -> set[int]:
    """Ids of all special tokens, including those without a role, which `all_special_ids` leaves out."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {*tokenizer.all_special_ids, *(number for number, token in added.items() if token.special)}


def _is_one_token(tokenizer: Any, text: str) -> bool:
    try:
        return len(tokenizer.encode(text, add_special_tokens=False)) == 1
    except Exception:  # tokenizers raise bare Exception for a character they have no token for
        return False


async def _answer(
    engine: Engine, order: ProbeSpec, tokens: PromptTokens, index: int, prompt_P: np.ndarray, sample: int
) -> ProbeAnswer:
    stop = tuple(dict.fromkeys((*order.sampling.stop_token_ids, *tokens.stop_ids)))
    sampling = msgspec.structs.replace(order.sampling, stop_token_ids=() if order.sampling.ignore_eos else stop)
    request = GenerationRequest(
        request_id=index * order.num_samples + sample + 1,
        prompt_P=prompt_P,
        prefix=Segment.empty(),
        sampling=sampling,
        seed=(order.seed * 1_000_003 + index * order.num_samples + sample) % 2**63,
        share_key=index,
        stops=stop_strings(tokens, sampling),
    )
    outcome = await engine.generate(request)
    tokens_R = outcome.segment.tokens_R
    return ProbeAnswer(
        row=index,
        text=tokens.decode(tokens_R),
        prompt_P=prompt_P.tolist(),
        tokens_R=tokens_R.tolist(),
        logprobs_R=[float(one) for one in outcome.segment.logprobs_R],
        is_cut=outcome.end_reason != "stop",
    )


def _with_answers(known: ProbeAnswers, tokenizer: Any, answers: list[ProbeAnswer]) -> ProbeAnswers:
    """Add answers, with special tokens that did not end them, and tokens outside the tokenizer."""
    special = special_ids(tokenizer)
    passed: Counter[str] = Counter()
    for answer in answers:
        inside = answer.tokens_R if answer.is_cut else answer.tokens_R[:-1]
        passed.update(str(tokenizer.convert_ids_to_tokens(one)) for one in special & set(inside))
    outside = sum(any(one >= known.tokenizer_size for one in answer.tokens_R) for answer in answers)
    return msgspec.structs.replace(known, answers=answers, passed_over=dict(passed), outside_tokenizer=outside)


def _vocab_size(model_dir: Path) -> int:
    config = msgspec.json.decode((model_dir / "config.json").read_bytes())
    size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return int(size or 0)


def _context(order: ProbeSpec, settings: RolloutSettings, folder: Path) -> EngineContext:
    return EngineContext(
        worker="rollout-0", index=0, model_dir=Path(order.model_dir), settings=settings.engine,
        dtype=settings.engine.dtype or order.dtype, num_threads=order.num_threads, seed=order.seed,
        interruption=settings.interruption, max_new_tokens=order.sampling.max_new_tokens, starts_empty=False,
        startup_timeout_s=order.startup_timeout_s, log_dir=folder, emulation=None,
        tracer=Tracer.of(folder, "probe", TraceSettings()), report=lambda words: print(words, file=sys.stderr),
    )  # fmt: skip


def main(source: Path, target: Path) -> None:
    """Run the process. Files that it leaves when it is killed are next to the answers, in a folder that is cleaned
    up.
    """
    run_spec(source, target, ProbeSpec, lambda order: asyncio.run(answers_to(order, scratch=target.parent)))


if __name__ == "__main__":
    quick_exit.run(lambda: main(Path(sys.argv[1]), Path(sys.argv[2])))
