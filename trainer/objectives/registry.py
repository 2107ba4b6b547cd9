"""Every loss and every way to compute advantages, by name, and what of the configuration fits together.

Owns: the tables (one line for each entry), `loss_of`, `advantage_of`, `loss_faults`, `advantage_faults`.
Refuses: torch: the controller, which has none, asks this module what a configuration needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainer.config import AdvantageSettings, LossSettings
from trainer.objectives.advantages import global_norm, grpo, grpo_no_std, rloo
from trainer.objectives.losses import cispo, decoupled_ppo, dppo, gspo, sapo, vespo
from trainer.objectives.options import option_faults, options_of
from trainer.objectives.own_code import is_own, own_advantage, own_objective
from trainer.objectives.port import Advantage, Fault, Needs, Objective

OBJECTIVES: Mapping[str, Objective] = {
    one.name: one
    for one in (
        decoupled_ppo.OBJECTIVE,
        gspo.OBJECTIVE,
        cispo.OBJECTIVE,
        sapo.OBJECTIVE,
        dppo.OBJECTIVE,
        vespo.OBJECTIVE,
    )
}
"""Built-in losses: `trainer.loss.kind`."""

ADVANTAGES: Mapping[str, Advantage] = {
    one.name: one
    for one in (
        grpo.ADVANTAGE,
        grpo_no_std.ADVANTAGE,
        rloo.ADVANTAGE,
        global_norm.ADVANTAGE,
    )
}
"""Built-in advantages: `trainer.advantage.kind`."""

LOSS_SECTION = "trainer.loss"
ADVANTAGE_SECTION = "trainer.advantage"
_KEYS_OF_SOME = ("eps_low", "eps_high", "dual_clip")
"""Keys of trainer.loss that only some losses read."""


@dataclass(frozen=True)
class ChosenLoss:
    """The configured loss with its options, and all that the step must compute for it."""

    objective: Objective
    options: Any
    needs: Needs


def loss_of(settings: LossSettings) -> ChosenLoss:
    """Find the loss and make its options; imports a user's module. Raises UserError."""
    objective = own_objective(settings.kind) if is_own(settings.kind) else OBJECTIVES[settings.kind]
    options = options_of(objective.options, settings, LOSS_SECTION, objective.keys)
    needs = objective.needs_with(options)
    every_sequence = needs.every_sequence or settings.kl_coef > 0 or settings.entropy_coef > 0
    return ChosenLoss(
        objective,
        options,
        Needs(
            proximal=needs.proximal,
            sequences=needs.sequences,
            reference=needs.reference or settings.kl_coef > 0,
            values=needs.values,
            entropy=needs.entropy or settings.entropy_coef > 0,
            every_sequence=every_sequence,
        ),
    )


def needs_reference(settings: LossSettings) -> bool:
    """True where log-probs under the reference model enter the loss. Imports a user's module."""
    return loss_of(settings).needs.reference


def loss_faults(settings: LossSettings, objective: Objective | None = None) -> Iterator[Fault]:
    """Find what of trainer.loss does not fit its loss.

    objective: where the caller has imported a user's module; without it a user's loss is left out.
    """
    if objective is None and is_own(settings.kind):
        return
    chosen = objective or OBJECTIVES.get(settings.kind)
    if chosen is None:
        yield Fault(
            f"{LOSS_SECTION}.kind", f"no loss `{settings.kind}`", f"{', '.join(OBJECTIVES)}, or module:function"
        )
        return
    yield from _idle_keys(settings, chosen)
    faults = option_faults(chosen.options, settings, LOSS_SECTION, chosen.keys)
    yield from faults
    if faults:
        return
    options = options_of(chosen.options, settings, LOSS_SECTION, chosen.keys)
    needs = chosen.needs_with(options)
    if needs.proximal not in ("any", settings.proximal):
        keys = "proximal: behaviour with weight.mode: off" if needs.proximal == "behaviour" else "proximal: recompute"
        anchor = "the policy that sampled the tokens" if needs.proximal == "behaviour" else "recomputed log-probs"
        what = f"`{settings.kind}` needs {anchor} as its proximal policy, not `{settings.proximal}`"
        yield Fault(f"{LOSS_SECTION}.proximal", what, keys)
    if needs.values:
        yield Fault(f"{LOSS_SECTION}.kind", f"`{settings.kind}` needs the values of a critic, and there is none")
    yield from chosen.conflicts(settings, options)


def _idle_keys(settings: LossSettings, chosen: Objective) -> Iterator[Fault]:
    """Keys that were set although the loss does not read them."""
    for key in _KEYS_OF_SOME:
        value = getattr(settings, key)
        if key not in chosen.keys and value != LossSettings.model_fields[key].default:
            readers = [name for name, one in OBJECTIVES.items() if key in one.keys]
            remedy = f"remove it: {', '.join(readers)} reads it"
            if key in chosen.options.model_fields:
                remedy = f"{LOSS_SECTION}.options.{key}: {value:g}"
            yield Fault(f"{LOSS_SECTION}.{key}", f"has no effect with kind: {settings.kind}", remedy)


def advantage_of(settings: AdvantageSettings) -> tuple[Advantage, Any]:
    """Find the advantage and make its options; imports a user's module. Raises UserError."""
    advantage = own_advantage(settings.kind) if is_own(settings.kind) else ADVANTAGES[settings.kind]
    return advantage, options_of(advantage.options, settings, ADVANTAGE_SECTION, advantage.keys)


def advantage_faults(
    settings: AdvantageSettings, group_size: int, advantage: Advantage | None = None
) -> Iterator[Fault]:
    """Find what of trainer.advantage does not fit, as `loss_faults`."""
    if advantage is None and is_own(settings.kind):
        return
    chosen = advantage or ADVANTAGES.get(settings.kind)
    kind = f"{ADVANTAGE_SECTION}.kind"
    if chosen is None:
        yield Fault(kind, f"no advantage `{settings.kind}`", f"{', '.join(ADVANTAGES)}, or module:function")
        return
    if chosen.needs_values:
        yield Fault(kind, f"`{settings.kind}` needs the values of a critic, and there is none")
    if group_size == 1 and chosen.single_sample:
        others = [name for name, one in ADVANTAGES.items() if not one.single_sample]
        yield Fault(
            "group_size",
            f"with one sample a group, `{settings.kind}` gives every sample the advantage 0 ({chosen.single_sample})",
            f"group_size of 2 or more, or trainer.advantage.kind: {' or '.join(others)}",
        )
    default = AdvantageSettings.model_fields["std_eps"].default
    if "std_eps" not in chosen.keys and settings.std_eps != default:
        yield Fault(f"{ADVANTAGE_SECTION}.std_eps", f"has no effect with kind: {settings.kind}", "remove it")
    yield from option_faults(chosen.options, settings, ADVANTAGE_SECTION, chosen.keys)
