"""How long a run's processes waited for a core because programs outside the run used it.

A pulse has for each process the time that it ran (cpu_s) and the time that its threads were ready and waited for a core
(queue_s), and for the machine the time that its cores worked. What the machine worked beyond the run's processes is the
work of others. Between two pulses, of process p with `cpu` and `queue` in seconds per second:

    waits(p)   = queue / max(1, cpu + queue)      share of time; with several ready threads they wait at the same time
    others     = (busy - own) / busy              share of the others in the work of the machine
    held_up(p) = waits(p) * others                if at least MACHINE_FULL of its cores worked; otherwise 0

A process that sleeps (a slow scorer, an emulated device) does not wait for a core. Processes of a run that wait for
each other's cores are not held up by others. Used in shares.py and waits.py; nothing is known of runs on several
machines, and of systems without queue_s.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from controller.report.cores import between
from controller.report.data import Row, number

MACHINE_FULL = 0.8
"""With more idle cores, a process that waits is limited to some of them, and the total says nothing."""
TOO_MUCH = 0.5
"""Above this share of time, what is left of a wait is within the error of the formula: waits are not judged."""


@dataclass(frozen=True)
class MachineLoad:
    """Means over the time between the pulses. All zero where nothing is known."""

    others: float = 0.0
    """Number of cores that other programs used."""
    held_up: Mapping[str, float] = field(default_factory=dict)
    """Share of time by process."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """By process; the controller has none."""
    is_partial: bool = False
    """Whether time in which others kept most of the machine is left out, here and in the shares of the run."""

    def of(self, role: str) -> float:
        """Mean over the processes of a role."""
        found = [share for name, share in self.held_up.items() if self.roles.get(name) == role]
        return sum(found) / len(found) if found else 0.0

    @property
    def on_the_way(self) -> float:
        """Share of time by which samples are late at the trainer: controller, rollout workers and reward service
        together, at most 1.
        """
        alone = sum(share for name, share in self.held_up.items() if name not in self.roles)
        return min(1.0, alone + self.of("rollout") + self.of("reward"))

    @property
    def is_too_much(self) -> bool:
        """Whether waits between the run's processes cannot be judged."""
        return self.on_the_way >= TOO_MUCH

    def trainer_wait(self, share: float) -> float:
        """The trainer's waiting share without the others: trainer and samples would take less time. NaN stays NaN."""
        if math.isnan(share) or not self.held_up:
            return share
        worked = max(0.0, 1.0 - share - self.of("trainer"))
        return min(share, max(0.0, 1.0 - worked / max(1.0 - self.on_the_way, 1e-9)))

    def without(self, share: float, role: str) -> float:
        """A share of time that a role's processes take, without the others. NaN stays NaN."""
        if math.isnan(share):
            return share
        return min(share, max(0.0, share - self.of(role)) / max(1.0 - self.on_the_way, 1e-9))


def measure(pairs: Sequence[tuple[Row, Row]]) -> MachineLoad:
    """Compute the load from pairs of consecutive pulses of one machine."""
    total_s = 0.0
    others = 0.0
    held_up: defaultdict[str, float] = defaultdict(float)
    roles: dict[str, str] = {}
    for pair in pairs:
        elapsed_s, spent = next(((elapsed_s, spent) for _, elapsed_s, spent in between(pair)), (0.0, {}))
        queued = next((queued for _, _, queued in between(pair, "queue_s")), {})
        found = _machine_cores(*pair, elapsed_s) if queued else None
        if found is None:
            continue
        cores, busy = found
        own = sum(spent.values()) / elapsed_s
        total_s += elapsed_s
        others += max(0.0, busy - own) * elapsed_s
        share = max(0.0, busy - own) / busy if busy >= MACHINE_FULL * cores else 0.0
        for name, queue_s in queued.items():
            queue, cpu = queue_s / elapsed_s, spent.get(name, 0.0) / elapsed_s
            held_up[name] += elapsed_s * share * queue / max(1.0, cpu + queue)
        roles |= {name: str(process.get("role")) for name, process in pair[1]["processes"].items()}
    if not total_s:
        return MachineLoad()
    return MachineLoad(others / total_s, {name: seconds / total_s for name, seconds in held_up.items()}, roles)


def _machine_cores(earlier: Row, later: Row, elapsed_s: float) -> tuple[float, float] | None:
    """Cores of the machine, and how many of them worked on average; None if unknown."""
    before, after = (_machine(pulse) for pulse in (earlier, later))
    cores, busy = number(after, "cores"), (number(after, "busy_s") - number(before, "busy_s")) / elapsed_s
    return (cores, busy) if cores > 0 and busy > 0 else None


def _machine(pulse: Row) -> Mapping[str, object] | None:
    reported = pulse.get("processor")
    machine = reported.get("machine") if isinstance(reported, Mapping) else None
    return machine if isinstance(machine, Mapping) else None
