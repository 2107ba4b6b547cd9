"""`areal-like probe`: takes a few samples of the starting model and checks them before a run is started.

Runs the short-lived processes that do the work with the run's own code: trainer/prepare.py, rollout/probe_answers.py,
services/reward/try_answers.py, trainer/probe_logprobs.py. Conclusions are in findings.py, layout in page.py.

The processes run one after the other: the model and its version 0, samples, verdicts on samples and gold answers,
log-probs of the trainer. Each is guarded: its children are killed when it exits, and it is killed when this process
exits (areal_like/guard.py). Their files are in a folder among the runs, or in shared memory if runs of the config are
encrypted. It is removed with the probe; the folder of a killed probe is removed when the next one starts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from areal_like.errors import OperationError, UserError
from areal_like.plain_folder import required_memory
from areal_like.probe_files import LogprobSpec, ProbeAnswers, ProbeSpec, TryAnswer, TrySpec, TryVerdict
from areal_like.store_owner import claim, sweep_dead
from areal_like.weights.weight_store import WeightStore
from controller.config.run_config import RunConfig
from controller.data.gold_answers import gold_answers
from controller.data.mixing import order_of
from controller.data.table import Table, load_demonstrations
from controller.launch.short_process import run_module
from controller.probe.finding import GoldTry, Seen
from controller.runtime.model_preparation import prepared_before, write_rows
from controller.wiring.process_specs import (
    PREPARATION,
    PROBE_ANSWERS,
    PROBE_LOGPROBS,
    TRY_ANSWERS,
    num_cores,
    prepare_spec,
)

FOLDER_PREFIX = ".probe-"
MAX_LOGPROB_SAMPLES = 16
LIMIT_S = 1800.0
"""Time limit of one process, in addition to the time a worker may take to start."""
ASKED_SCORERS = frozenset({"http", "llm_judge"})
"""Scorers that use a service that may cost money; gold answers in many forms are not sent to them."""
T = TypeVar("T")


@dataclass(frozen=True)
class Probe:
    """A probe of one config. warm_start: run the supervised steps first, unless an earlier run has done so."""

    config: RunConfig
    num_prompts: int
    num_samples: int
    warm_start: bool
    say: Callable[[str], None]

    def run(self, table: Table) -> tuple[Seen, list[str]]:
        """Run the probe; return the collected data, and remarks on parts left out. Raises UserError, OperationError,
        KeyboardInterrupt.
        """
        config = self.config
        if config.emulation is not None:
            raise UserError(
                "emulated devices compute nothing, so there is nothing to probe",
                where="emulation",
                remedy="set emulation=null, or use a different config",
            )
        order = order_of(config, table)
        count = min(self.num_prompts, len(table), order.max_draws or self.num_prompts)
        rows = [dict(table[order.row_index(draw)]) for draw in range(count)]
        place = Path(config.runs_dir).expanduser() if config.encryption is None else required_memory()
        place.mkdir(parents=True, exist_ok=True)
        sweep_dead(place, FOLDER_PREFIX)
        with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX, dir=place) as name:
            claim(Path(name))
            return self._look(rows, Path(name).resolve())

    def _look(self, rows: list[dict[str, Any]], folder: Path) -> tuple[Seen, list[str]]:
        config, notes = self.config, []
        warm = prepared_before(config) if config.warm_start is not None else None
        is_trained = config.model.path is not None or warm is not None or self.warm_start
        warm_start_follows = config.warm_start is not None and warm is None and not self.warm_start
        if warm_start_follows:
            notes.append(
                "the model is probed before its warm start, so few or no rewards are expected; use `--warm-start` to "
                "run the supervised steps first, unless an earlier run has already done the warm start"
            )
        self.say("preparing the starting model")
        manifest = self._prepare(folder, warm)
        self.say(f"generating {self.num_samples} samples for each of {len(rows)} prompts")
        sampled = self._sample(folder, rows, manifest)
        verdicts, gold = self._score(folder, rows, sampled, notes)
        self.say("computing the trainer's log-probs")
        trainer = config.trainer
        seen = Seen(
            rows, sampled, config.train_sampling, verdicts, gold, self._logprobs(folder, sampled, notes),
            prompt_template=config.rollout.prompt_template,
            is_half=trainer.precision != "float32" or (config.rollout.engine.dtype or config.model.dtype) != "float32",
            is_untrained=not is_trained,
            warm_start_follows=warm_start_follows,
        )  # fmt: skip
        return seen, notes

    def _prepare(self, folder: Path, warm: Path | None) -> Path:
        """Prepare the model's folder and version 0; return the manifest."""
        config, rows_path = self.config, None
        if warm is not None:
            model = config.model.model_copy(update={"path": str(warm), "init": None, "tokenizer": "from_model"})
            config = config.model_copy(update={"model": model, "warm_start": None})
        elif self.warm_start and (demonstrations := load_demonstrations(config)) is not None:
            write_rows(demonstrations, rows_path := folder / "demonstrations.jsonl")
        spec = prepare_spec(
            config, out_dir=folder / "model", sft_rows=rows_path, status_path=folder / "status.jsonl",
            publish_to=folder / "weights",
        ).model_copy(update={"publish_kind": "disk"})  # fmt: skip
        spec.save(folder / "prepare.json")
        run_module([PREPARATION, "--spec", str(folder / "prepare.json")], self._limit_s)
        manifest = WeightStore(folder / "weights", "disk", keep=2).newest()
        assert manifest is not None, "the preparation published nothing"
        return manifest

    def _sample(self, folder: Path, rows: list[dict[str, Any]], manifest: Path) -> ProbeAnswers:
        config = self.config
        settings = config.rollout.model_dump(mode="json")
        settings["engine"]["device"] = config.rollout_devices[0]
        order = ProbeSpec(
            model_dir=str(folder / "model"), tokenizer="from_model", dtype=config.model.dtype, manifest=str(manifest),
            settings=settings, sampling=config.train_sampling, rows=rows, num_samples=self.num_samples,
            seed=config.seed, num_threads=num_cores(), startup_timeout_s=config.launch.startup_timeout_s,
        )  # fmt: skip
        return self._ask(PROBE_ANSWERS, order, folder, ProbeAnswers)

    def _score(
        self, folder: Path, rows: list[dict[str, Any]], sampled: ProbeAnswers, notes: list[str]
    ) -> tuple[list[TryVerdict], list[GoldTry]]:
        reward = self.config.reward
        if self.config.rollout.workflow != "single_turn":
            notes.append(
                "rewards are not computed, because a probe does not run rollout.workflow; it only samples answers to "
                "the first prompt of each episode"
            )
            return [], []
        if reward.addresses:
            notes.append("rewards are not computed, because separate services score the answers (reward.addresses)")
            return [], []
        self.say("scoring")
        tries = list(gold_answers(rows))
        if ASKED_SCORERS & {scorer.kind for scorer in reward.scorers}:
            notes.append("gold answers are not scored, because a scorer sends answers to a service")
            tries = []
        answers = [
            TryAnswer(
                row=rows[one.row], response=one.text, finish_reason="length" if one.is_cut else "stop",
                num_tokens=len(one.tokens_R),
            )
            for one in sampled.answers
        ]  # fmt: skip
        answers += [TryAnswer(row=rows[row], response=text, num_tokens=len(text)) for row, _, text in tries]
        order = TrySpec(settings=reward.model_dump(mode="json"), answers=answers)
        found = self._ask(TRY_ANSWERS, order, folder, list[TryVerdict])
        verdicts, judged = found[: len(sampled.answers)], found[len(sampled.answers) :]
        return verdicts, [GoldTry(*one, verdict) for one, verdict in zip(tries, judged, strict=True)]

    def _logprobs(self, folder: Path, sampled: ProbeAnswers, notes: list[str]) -> list[list[float]]:
        """Compute the trainer's log-probs; None if the whole model does not fit one of its devices (a run may shard
        it).
        """
        if not sampled.answers:
            return []
        config = self.config
        order = LogprobSpec(
            model_dir=str(folder / "model"), device=config.trainer_devices[0], precision=config.trainer.precision,
            attention=config.trainer.attention, temperature=config.sampling.temperature, num_threads=num_cores(),
            sequences=[(one.prompt_P, one.tokens_R) for one in sampled.answers[:MAX_LOGPROB_SAMPLES]],
        )  # fmt: skip
        try:
            return self._ask(PROBE_LOGPROBS, order, folder, list[list[float]])
        except OperationError as error:
            notes.append(f"log-probs of the trainer are not available: {str(error).splitlines()[-1]}")
            return []

    @property
    def _limit_s(self) -> float:
        return self.config.launch.startup_timeout_s + LIMIT_S

    def _ask(self, module: str, order: msgspec.Struct, folder: Path, kind: type[T]) -> T:
        """Run `python -m module IN OUT` and return its output. Raises UserError, OperationError."""
        source, target = folder / f"{module}.in.json", folder / f"{module}.out.json"
        source.write_bytes(msgspec.json.encode(order))
        run_module([module, str(source), str(target)], self._limit_s)
        return msgspec.json.decode(target.read_bytes(), type=kind)
