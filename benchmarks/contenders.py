"""The contenders of `async_vs_sync`: the settings of each mode on emulated devices, real ones and a user's own.

Contains the overrides of each contender, the candidates among which the synchronous baseline is tuned, and the
planner's split. async_vs_sync.py runs them.

Every contender has the same devices, consumes the same number of samples, and gets answers of the same lengths if
devices are emulated or lengths forced. Synchronous: all GPUs generate, then all train; otherwise `share` of them
generate. Every answer of a synchronous step comes from the policy that trains on it, so the baseline does not recompute
proximal log-probs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from areal_like.emulation.machines import gpu_named, model_named
from areal_like.emulation.roofline import Efficiencies
from areal_like.errors import UserError
from benchmarks.published import PROMPTS, TABLE_1
from controller.config.loading import load_config
from controller.config.validation.pool_sizes import gpus_of_run, gpus_of_worker
from controller.data.length_distribution import THINKING, parse_lengths
from controller.simulate.plan import Setup, simulate

SYNC = ("mode=sync", "trainer.loss.proximal=behaviour", "trainer.loss.weight.mode=off")
EMULATED = "emulated"
APART = "sync, pools apart"
FORCED = " with lengths "
PLANNED = "planned split"
FULLER = 4
"""Factor on the batch size, to measure a worker on its own."""
ALONE = 4096
"""Number of samples over which the cost of a single worker is measured, unless a few steps have more."""
TPS = (1, 2, 4)
"""GPUs per rollout worker; the baseline is also tried with all GPUs in one worker."""
SLOTS_PER_GPU = 64
"""Slots per GPU of the baseline's single worker: a step of the published batches has at most 512 answers on 8 GPUs."""
SPEEDUPS = {"1.5b": 20, "7b": 60, "14b": 120, "32b": 240}
"""Speedups for which a step takes some seconds. The system's own time is multiplied by them in the figures."""

Row = dict[str, float]


@dataclass(frozen=True)
class Contender:
    """One line of the table."""

    name: str
    mode: str
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Emulated:
    """The emulated devices of a comparison."""

    gpu: str
    model: str
    gpus: int
    share: float
    floor_ms: float

    @property
    def label(self) -> str:
        """Name in tables."""
        return f"{EMULATED} {self.gpus} {self.gpu}, {self.model}, floor {self.floor_ms:g} ms"

    def batch(self) -> list[str]:
        """Override for as many groups per GPU as in the published run of this size; none if none was published."""
        gpus = [row.gpus for row in TABLE_1 if row.model == self.model]
        return [f"groups_per_step={max(1, round(PROMPTS * self.gpus / gpus[0]))}"] if gpus else []

    def settings(self, *, is_sync: bool, share: float | None = None, tp: int = 1) -> tuple[str, ...]:
        """Overrides that place the job on the GPUs. tp: GPUs per rollout worker."""
        rollout = self.gpus if is_sync else round(self.gpus * (share or self.share) / tp) * tp
        trainer = self.gpus if is_sync else self.gpus - rollout
        return (
            f"emulation.gpu={self.gpu}", f"emulation.model={self.model}", f"emulation.tp={tp}",
            f"emulation.speedup={SPEEDUPS.get(self.model, 20) * (1.5 if self.floor_ms >= 6 else 1)}",
            f"emulation.trainer_gpus={trainer}", f"rollout.num_workers={rollout // tp}",
            f"emulation.decode_floor_s={self.floor_ms / 1e3}",
        )  # fmt: skip

    def baselines(self) -> list[Contender]:
        """Candidates for strict synchrony: GPUs per worker, and thus the size of its batch; migration."""
        made = [
            Contender(f"sync, tp {tp}", "sync", (*SYNC, *self.settings(is_sync=True, tp=tp)))
            for tp in TPS
            if self.gpus % tp == 0
        ]
        if self.gpus not in TPS:
            whole = f"rollout.engine.num_slots={self.gpus * SLOTS_PER_GPU}"
            keys = (*SYNC, *self.settings(is_sync=True, tp=self.gpus), whole)
            made.append(Contender(f"sync, tp {self.gpus}", "sync", keys))
        still = (*SYNC, *self.settings(is_sync=True), "rollout.routing.migration=false")
        return [*made, Contender("sync, tp 1, no migration", "sync", still)]

    def contenders(self, bounds: Sequence[int], planned: tuple[float, int] | None) -> list[Contender]:
        """All but the tuned baseline, and the paper's own baseline: synchronous, on the same two pools."""
        apart = self.settings(is_sync=False)
        found = [
            Contender(APART, "sync", (*SYNC, *apart)),
            Contender("one_step_off", "one_step_off", ("mode=one_step_off", *apart)),
        ]
        found += [
            Contender(f"async {bound}", "async", ("mode=async", f"staleness.max_staleness={bound}", *apart))
            for bound in bounds
        ]
        if planned is not None:
            share, tp = planned
            laid = self.settings(is_sync=False, share=share, tp=tp)
            name = f"async 4, {PLANNED} {share:.1%}, tp {tp}"
            found.append(Contender(name, "async", ("mode=async", "staleness.max_staleness=4", *laid)))
        return found

    def planned(self, config: str, overrides: Sequence[str]) -> tuple[float, int]:
        """Share of the GPUs for rollout and GPUs per worker that the simulator finds best, at max_staleness 4.

        It plans for engines that admit requests by their cache, not for emulated ones (docs/simulate.md).
        """
        job = load_config(config, [*overrides, "mode=async", "staleness.max_staleness=4"]).config
        emulation = job.emulation
        assert emulation is not None
        scale = emulation.token_scale
        cap = job.sampling.max_new_tokens * scale
        mean = emulation.mean_tokens
        lengths = parse_lengths(THINKING if mean is None else f"{THINKING}@{mean}", cap)
        reached = Efficiencies(
            decode_floor_s=self.floor_ms / 1e3, bandwidth=emulation.bandwidth, train_mfu=emulation.train_mfu,
            prefill_mfu=emulation.prefill_mfu, step_overhead_s=0.0,
        )  # fmt: skip
        sampling = job.sampling.model_copy(update={"max_new_tokens": cap})
        setup = Setup(
            job.model_copy(update={"sampling": sampling}), lengths, num_steps=24, gpu=gpu_named(self.gpu),
            model=model_named(self.model), gpus=self.gpus, reached=reached, prompt_tokens=emulation.prompt_tokens,
        )  # fmt: skip
        rates = {}
        for tp in TPS:
            for gpus in range(tp, self.gpus, tp):
                laid = replace(setup, rollout_share=gpus / self.gpus, tp=tp)
                with contextlib.suppress(UserError):  # the model does not fit so few GPUs
                    rates[gpus / self.gpus, tp] = simulate(laid).outcome.samples_per_s
        return max(rates, key=lambda laid: rates[laid])


@dataclass(frozen=True)
class Real:
    """This machine's cores. sequences: per core and step; lengths: forced ones, as in sampling.forced_lengths;
    accuracy: the time until it is reached is measured.
    """

    sequences: int
    cores: int
    group_size: int = 8
    lengths: str | None = None
    accuracy: float | None = None

    @property
    def label(self) -> str:
        """Name in tables."""
        return f"{self.cores} real cores, {self.sequences} sequences a core{_reported(self.lengths)}{self._until}"

    @property
    def _until(self) -> str:
        return "" if self.accuracy is None else f", evaluated up to {self.accuracy:.0%}"

    @property
    def _groups(self) -> int:
        """Groups per step."""
        return max(1, self.sequences * self.cores // self.group_size)

    def settings(self) -> tuple[str, ...]:
        """Overrides of batch and slots; a step has `sequences` samples per core."""
        samples = self.sequences * self.cores
        return (
            f"groups_per_step={self._groups}", f"group_size={min(self.group_size, samples)}",
            f"rollout.engine.num_slots={samples}", *_forced(self.lengths),
        )  # fmt: skip

    def baselines(self) -> list[Contender]:
        """One worker with all threads, or one worker per core."""
        whole = (*SYNC, *self.settings())
        spread = (*whole, f"rollout.num_workers={self.cores}", "rollout.threads=1",
                  f"rollout.engine.num_slots={self.sequences}")  # fmt: skip
        return [Contender("sync, one worker", "sync", whole), Contender("sync, a worker a core", "sync", spread)]

    def alone(self) -> tuple[tuple[Contender, str], tuple[Contender, str]]:
        """Two runs that measure the costs of the trainer and of one rollout worker, which take turns with one thread
        each. Each with a number of steps that is enough for several pulses.

        The first measures the trainer. The second measures the worker: its batches are FULLER times as large as its
        slots, so that these are full nearly all the time.
        """
        samples = self.sequences * self.cores
        threads = ("mode=sync", "rollout.threads=1", "trainer.threads=1", "rollout.num_workers=1")
        fuller = (*self.settings(), f"groups_per_step={FULLER * self._groups}")
        return (
            (Contender("alone", "sync", (*self.settings(), *threads)), f"num_steps={max(12, ALONE // samples)}"),
            (Contender("alone", "sync", (*fuller, *threads)), f"num_steps={max(4, ALONE // samples // FULLER)}"),
        )

    def bound(self, trainer: Mapping[str, float], worker: Mapping[str, float], row: Mapping[str, float]) -> Row:
        """Processor seconds per step of each pool on its own, and the share of the possible rate that a run reached.

        trainer, worker: processor seconds per token of each (steady.alone); row: the run's figures.
        """
        trainer_s = trainer["trainer_token_s"] * row["step_work"]
        rollout_s = worker["rollout_token_s"] * row["step_sampled"] / max(1, self.cores - 1)
        share = max(trainer_s, rollout_s) / row["step_s"]
        return {"trainer_alone_s": trainer_s, "rollout_alone_s": rollout_s, "bound_share": share}

    def contenders(self, bounds: Sequence[int], planned: tuple[float, int] | None) -> list[Contender]:
        """All but the baseline: one core trains, the others generate."""
        own = (*self.settings(), f"rollout.num_workers={max(1, self.cores - 1)}")
        found = [Contender("one_step_off", "one_step_off", ("mode=one_step_off", *own))]
        return found + [
            Contender(f"async {bound}", "async", ("mode=async", f"staleness.max_staleness={bound}", *own))
            for bound in bounds
        ]


@dataclass(frozen=True)
class Own:
    """A user's job on the devices that its config names: only mode, bound and the baseline's pools change.

    overrides: those that the job is started with. lengths: forced ones.
    """

    config: str
    overrides: tuple[str, ...]
    cores: int
    lengths: str | None = None

    @property
    def label(self) -> str:
        """Name in tables."""
        return f"{Path(self.config).stem}, its own devices{_reported(self.lengths)}"

    def baselines(self) -> list[Contender]:
        """The config's own pools in turn, and all devices in both phases if its backend and engine allow it."""
        config = load_config(self.config, self.overrides).config
        made = [self._contender(APART, "sync", *SYNC)]
        if gpus := gpus_of_run(config):
            workers = f"rollout.num_workers={max(1, gpus // max(1, gpus_of_worker(config)))}"
            made += [
                self._contender(
                    f"sync, colocated, ranks {ranks}", "sync",
                    *SYNC, "placement=colocated", workers, f"trainer.ranks={ranks}",
                )
                for ranks in sorted({config.trainer.ranks, gpus})
            ]  # fmt: skip
        else:
            workers = f"rollout.num_workers={self.cores}"
            made.append(self._contender("sync, a worker a core", "sync", *SYNC, workers, "rollout.threads=1"))
        return [contender for contender in made if self._is_possible(contender)] or made[:1]

    def contenders(self, bounds: Sequence[int], planned: tuple[float, int] | None) -> list[Contender]:
        """The other modes, on the config's own pools."""
        found = [self._contender("one_step_off", "one_step_off", "mode=one_step_off")]
        return found + [
            self._contender(f"async {bound}", "async", "mode=async", f"staleness.max_staleness={bound}")
            for bound in bounds
        ]

    def _contender(self, name: str, mode: str, *changes: str) -> Contender:
        """The contender's own changes come last, so that they take precedence over the job's overrides."""
        return Contender(name, mode, (*self.overrides, *_forced(self.lengths), *changes))

    def _is_possible(self, contender: Contender) -> bool:
        try:
            load_config(self.config, contender.overrides)
        except UserError:
            return False
        return True


def _forced(lengths: str | None) -> tuple[str, ...]:
    return () if lengths is None else (f"sampling.forced_lengths={lengths}",)


def _reported(lengths: str | None) -> str:
    return "" if lengths is None else f"{FORCED}{lengths}"
