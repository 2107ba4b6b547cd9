"""The tables of all losses, corrections and advantages by name, and checks of their settings.

Imports no torch: the controller, which runs without it, uses this module to find out what a configuration needs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainer.config import AdvantageSettings, CorrectionSettings, LossSettings
from trainer.objectives.advantages import (
    distillation,
    gae,
    global_norm,
    grpo,
    grpo_no_std,
    lite_ppo,
    online_dpo,
    opob,
    reinforce_pp,
    reinforce_pp_baseline,
    rloo,
    turns,
)
from trainer.objectives.corrections import (
    balance_heuristic,
    geometric_mask,
    icepop,
    kl_rejection,
    kpop,
    m2po,
    no_eos_mask,
    opsm,
    sequence_rejection,
    sequence_weight,
    staleness_mask,
    staleness_weight,
    token_weight,
    veto,
)
from trainer.objectives.losses import bapo, cispo, decoupled_ppo, dppo, gspo, sapo, vespo
from trainer.objectives.options import option_faults, options_of
from trainer.objectives.own_code import is_own, own_advantage, own_correction, own_objective
from trainer.objectives.port import Advantage, Correction, Fault, Needs, Objective, Part
from trainer.objectives.versions import of_part

OBJECTIVES: Mapping[str, Objective] = {
    one.name: one
    for one in (
        decoupled_ppo.OBJECTIVE,
        gspo.OBJECTIVE,
        cispo.OBJECTIVE,
        sapo.OBJECTIVE,
        dppo.OBJECTIVE,
        vespo.OBJECTIVE,
        bapo.OBJECTIVE,
    )
}
"""Built-in losses: `trainer.loss.kind`."""

CORRECTIONS: Mapping[str, Correction] = {
    one.name: one
    for one in (
        icepop.CORRECTION,
        kpop.CORRECTION,
        veto.CORRECTION,
        geometric_mask.CORRECTION,
        sequence_rejection.CORRECTION,
        kl_rejection.CORRECTION,
        opsm.CORRECTION,
        m2po.CORRECTION,
        no_eos_mask.CORRECTION,
        staleness_mask.CORRECTION,
        staleness_weight.CORRECTION,
        sequence_weight.CORRECTION,
        token_weight.CORRECTION,
        balance_heuristic.CORRECTION,
    )
}
"""Built-in masks and weights: `trainer.loss.corrections`."""

ADVANTAGES: Mapping[str, Advantage] = {
    one.name: one
    for one in (
        grpo.ADVANTAGE,
        grpo_no_std.ADVANTAGE,
        rloo.ADVANTAGE,
        global_norm.ADVANTAGE,
        lite_ppo.ADVANTAGE,
        reinforce_pp.ADVANTAGE,
        reinforce_pp_baseline.ADVANTAGE,
        gae.ADVANTAGE,
        turns.ADVANTAGE,
        opob.ADVANTAGE,
        distillation.ADVANTAGE,
        online_dpo.ADVANTAGE,
    )
}
"""Built-in advantages: `trainer.advantage.kind`."""

LOSS_SECTION = "trainer.loss"
ADVANTAGE_SECTION = "trainer.advantage"
CRITIC_REMEDY = "trainer.critic: {}"
TEACHER_REMEDY = "trainer.teacher: {path: FOLDER}, or {model: NAME}"
VERSIONS_REMEDY = "trainer.version_logprobs: {}"
_KEYS_OF_SOME = ("eps_low", "eps_high", "dual_clip")
"""Keys of trainer.loss that only some losses read."""


@dataclass(frozen=True)
class ChosenLoss:
    """The configured loss and corrections with their options, and everything that the step must compute for them."""

    objective: Objective
    options: Any
    corrections: tuple[tuple[Correction, Any], ...]
    needs: Needs


def loss_of(settings: LossSettings) -> ChosenLoss:
    """Find the loss and corrections and create their options; imports a user's modules. Raises UserError."""
    objective = own_objective(settings.kind) if is_own(settings.kind) else OBJECTIVES[settings.kind]
    options = options_of(objective.options, settings, LOSS_SECTION, objective.keys)
    corrections = tuple(_correction_of(one, number) for number, one in enumerate(settings.corrections))
    all_needs = [objective.needs_with(options), *(one.needs for one, _ in corrections)]
    needs = Needs(
        proximal=all_needs[0].proximal,
        sequences=any(one.sequences for one in all_needs),
        reference=(settings.kl_coef > 0 and settings.kl_in == "loss") or any(one.reference for one in all_needs),
        values=any(one.values for one in all_needs),
        entropy=settings.entropy_coef > 0 or any(one.entropy for one in all_needs),
        versions=settings.proximal == "version" or any(one.versions for one in all_needs),
        mixture=any(one.mixture for one in all_needs),
        every_sequence=settings.kl_coef > 0 or settings.entropy_coef > 0 or all_needs[0].every_sequence,
    )
    return ChosenLoss(objective, options, corrections, needs)


def _correction_of(settings: CorrectionSettings, number: int) -> tuple[Correction, Any]:
    one = own_correction(settings.kind) if is_own(settings.kind) else CORRECTIONS[settings.kind]
    return of_part(one, settings.part), options_of(one.options, settings, f"{LOSS_SECTION}.corrections.{number}")


def needs_reference(loss: LossSettings, advantage: AdvantageSettings) -> bool:
    """True if log-probs under the reference model are used in loss, reward or advantage. Imports a user's modules."""
    return loss.kl_coef > 0 or loss_of(loss).needs.reference or advantage_of(advantage)[0].needs_reference


def corrects_for_sampling(settings: LossSettings) -> bool:
    """True if an importance weight corrects for another policy, or another precision, that sampled the tokens.

    A loss whose ratio is relative to the policy that sampled corrects for it itself. Of a user's loss only the settings
    are considered.
    """
    objective = OBJECTIVES.get(settings.kind)
    if objective is not None and not option_faults(objective.options, settings, LOSS_SECTION, objective.keys):
        options = options_of(objective.options, settings, LOSS_SECTION, objective.keys)
        if objective.needs_with(options).proximal == "behaviour":
            return True
    weighs = [
        one.kind
        for one in settings.corrections
        if one.kind in CORRECTIONS and CORRECTIONS[one.kind].is_weight and _part_of(one) != "staleness"
    ]
    return settings.proximal != "behaviour" and (settings.weight.mode != "off" or bool(weighs))


def _part_of(settings: CorrectionSettings) -> Part:
    """Return the part of the ratio that a built-in correction uses."""
    return CORRECTIONS[settings.kind].part if settings.part == "both" else settings.part


def loss_faults(
    settings: LossSettings,
    *,
    imports_own: bool = False,
    has_critic: bool = False,
    has_versions: bool = False,
    is_for_any_policy: bool = False,
) -> Iterator[Fault]:
    """Find settings of trainer.loss that do not fit together.

    imports_own: import a user's modules and check them as well (raises UserError); without it they are not checked.
    has_critic: there is a section trainer.critic. has_versions: there is a section trainer.version_logprobs.
    is_for_any_policy: `Advantage.is_for_any_policy` of trainer.advantage.
    """
    if not is_own(settings.kind) or imports_own:
        yield from _objective_faults(settings, has_critic)
    if settings.proximal == "version" and not has_versions:
        yield _no_versions(f"{LOSS_SECTION}.proximal", "proximal: version")
    found: list[Correction | None] = []
    for number, one in enumerate(settings.corrections):
        key = f"{LOSS_SECTION}.corrections.{number}"
        if is_own(one.kind):
            correction = own_correction(one.kind) if imports_own else None
        elif (correction := CORRECTIONS.get(one.kind)) is None:
            yield Fault(
                f"{key}.kind",
                f"there is no correction `{one.kind}`",
                f"use {', '.join(CORRECTIONS)}, or module:function",
            )
        if (one.kind, one.part) in [(other.kind, other.part) for other in settings.corrections[:number]]:
            yield Fault(f"{key}.kind", f"`{one.kind}` is listed twice", "remove one of the two entries")
        if correction is not None:
            if correction.needs.values and not has_critic:
                yield _no_critic(f"{key}.kind", one.kind)
            if one.part != "both" and not (correction.is_of_ratio and correction.part == "both"):
                what = f"`{one.kind}` does not use the full ratio, so it has no `part`"
                yield Fault(f"{key}.part", what, "remove it")
            else:
                correction = of_part(correction, one.part)
            if correction.needs.versions and not has_versions:
                yield _no_versions(f"{key}.{'kind' if one.part == 'both' else 'part'}", correction.name)
            faults = option_faults(correction.options, one, key)
            yield from faults or correction.conflicts(settings, options_of(correction.options, one, key))
        found.append(correction)
    yield from _weight_faults(settings, found, is_for_any_policy)
    yield from _kl_faults(settings)


def _kl_faults(settings: LossSettings) -> Iterator[Fault]:
    if settings.kl_coef > 0 and settings.kl_in == "loss" and settings.kl_estimator == "k1":
        what = (
            "the gradient of `k1` in the loss is that of the log-prob, whose mean is 0, so it does not constrain the "
            "policy"
        )
        yield Fault(f"{LOSS_SECTION}.kl_estimator", what, "use k2 or k3, or set kl_in: reward")
    if settings.kl_coef == 0:
        for key in ("kl_estimator", "kl_in"):
            if getattr(settings, key) != LossSettings.model_fields[key].default:
                yield Fault(f"{LOSS_SECTION}.{key}", "has no effect with kl_coef: 0", f"set kl_coef, or remove {key}")


def _weight_faults(
    settings: LossSettings, corrections: Iterable[Correction | None], is_for_any_policy: bool
) -> Iterator[Fault]:
    """Check that the importance weight exp(p - b) and each part of it is applied once, and not at all if p = b."""
    corrections = list(corrections)
    mode, key, proximal_key = settings.weight.mode, f"{LOSS_SECTION}.weight.mode", f"{LOSS_SECTION}.proximal"
    weights: list[tuple[str, Part]] = [
        (f"`{one.name}`", one.part) for one in corrections if one is not None and one.is_weight
    ]
    if settings.proximal == "behaviour" and mode != "off":
        what = f"with proximal: behaviour, the weight exp(p - b) is always 1, so `{mode}` has no effect"
        remedy = "set weight.mode: off for ordinary PPO, or proximal: recompute for decoupled PPO"
        yield Fault(key, what, remedy)
    if settings.proximal == "behaviour" and weights:
        what = (
            f"{weights[0][0]} weights by the policy that sampled, but with proximal: behaviour this is already part of "
            "the ratio"
        )
        yield Fault(proximal_key, what, "set proximal: recompute, or remove that correction")
        return
    stale = [name for name, part in weights if part != "mismatch"]
    if settings.proximal == "version" and stale:
        what = f"{stale[0]} weights by the staleness, but with proximal: version this is already part of the ratio"
        yield Fault(proximal_key, what, "set proximal: recompute, or part: mismatch for that correction")
    if mode != "off":
        weights.append((f"weight.mode: {mode}", "mismatch" if settings.proximal == "version" else "both"))
    for (first, one), (second, other) in itertools.combinations(weights, 2):
        if one == other or "both" in (one, other):
            shared = "exp(p - b)" if "both" in (one, other) else f"the {one}"
            yield Fault(
                key, f"{first} and {second} both weight by {shared}", "set weight.mode: off, and keep only one of them"
            )
            return
    if settings.proximal != "behaviour" and not weights and None not in corrections and not is_for_any_policy:
        what = f"with proximal: {settings.proximal} and no weight, the loss is not decoupled, and it is biased"
        remedy = "set weight.mode: exact, truncate or mask, or proximal: behaviour for ordinary PPO"
        yield Fault(key, what, remedy)


def _no_critic(key: str, kind: str) -> Fault:
    return Fault(key, f"`{kind}` requires the values of a critic, but trainer.critic is not set", CRITIC_REMEDY)


def _no_versions(key: str, what: str) -> Fault:
    return Fault(
        key, f"{what} requires log-probs under the sampling versions, but these are not computed", VERSIONS_REMEDY
    )


def reads_values(loss: LossSettings, advantage: AdvantageSettings) -> bool:
    """True if something may read a critic's values; a user's code may. Imports no user's module."""
    kinds = (loss.kind, advantage.kind, *(one.kind for one in loss.corrections))
    if any(is_own(kind) for kind in kinds):
        return True
    return ADVANTAGES[advantage.kind].needs_values or loss_of(loss).needs.values


def _objective_faults(settings: LossSettings, has_critic: bool) -> Iterator[Fault]:
    chosen = own_objective(settings.kind) if is_own(settings.kind) else OBJECTIVES.get(settings.kind)
    if chosen is None:
        yield Fault(
            f"{LOSS_SECTION}.kind",
            f"there is no loss `{settings.kind}`",
            f"use {', '.join(OBJECTIVES)}, or module:function",
        )
        return
    yield from _unused_keys(settings, chosen)
    faults = option_faults(chosen.options, settings, LOSS_SECTION, chosen.keys)
    yield from faults
    if faults:
        return
    options = options_of(chosen.options, settings, LOSS_SECTION, chosen.keys)
    needs = chosen.needs_with(options)
    if needs.proximal not in ("any", settings.proximal):
        keys = "proximal: behaviour with weight.mode: off" if needs.proximal == "behaviour" else "proximal: recompute"
        anchor = "the policy that sampled the tokens" if needs.proximal == "behaviour" else "recomputed log-probs"
        what = f"`{settings.kind}` requires {anchor} as its proximal policy, not `{settings.proximal}`"
        yield Fault(f"{LOSS_SECTION}.proximal", what, f"set {keys}")
    if needs.values and not has_critic:
        yield _no_critic(f"{LOSS_SECTION}.kind", settings.kind)
    yield from chosen.conflicts(settings, options)


def _unused_keys(settings: LossSettings, chosen: Objective) -> Iterator[Fault]:
    """Find keys that were set although the loss does not read them."""
    for key in _KEYS_OF_SOME:
        value = getattr(settings, key)
        if key not in chosen.keys and value != LossSettings.model_fields[key].default:
            readers = [name for name, one in OBJECTIVES.items() if key in one.keys]
            remedy = f"remove this key, which is only used by {', '.join(readers)}"
            if key in chosen.options.model_fields:
                remedy = f"set {LOSS_SECTION}.options.{key}: {value:g}"
            yield Fault(f"{LOSS_SECTION}.{key}", f"has no effect with kind: {settings.kind}", remedy)


def advantage_of(settings: AdvantageSettings) -> tuple[Advantage, Any]:
    """Find the advantage and create its options; imports a user's module. Raises UserError."""
    advantage = own_advantage(settings.kind) if is_own(settings.kind) else ADVANTAGES[settings.kind]
    return advantage, options_of(advantage.options, settings, ADVANTAGE_SECTION, advantage.keys)


def is_for_any_policy(settings: AdvantageSettings) -> bool:
    """True for a built-in advantage whose loss needs no importance weight."""
    return settings.kind in ADVANTAGES and ADVANTAGES[settings.kind].is_for_any_policy


def advantage_faults(
    settings: AdvantageSettings,
    group_size: int,
    advantage: Advantage | None = None,
    *,
    has_critic: bool = False,
    has_teacher: bool = False,
) -> Iterator[Fault]:
    """Find settings of trainer.advantage that do not fit together, as `loss_faults` does.

    has_teacher: there is a section trainer.teacher.
    """
    if advantage is None and is_own(settings.kind):
        return
    chosen = advantage or ADVANTAGES.get(settings.kind)
    kind = f"{ADVANTAGE_SECTION}.kind"
    if chosen is None:
        yield Fault(
            kind,
            f"there is no advantage estimator `{settings.kind}`",
            f"use {', '.join(ADVANTAGES)}, or module:function",
        )
        return
    if chosen.needs_values and not has_critic:
        yield _no_critic(kind, settings.kind)
    if chosen.needs_teacher and not has_teacher:
        yield Fault(kind, f"`{settings.kind}` requires a teacher, but none is configured", TEACHER_REMEDY)
    if group_size == 1 and chosen.single_sample:
        others = [
            name for name, one in ADVANTAGES.items() if not (one.single_sample or one.needs_values or one.needs_teacher)
        ]
        yield Fault(
            "group_size",
            f"with one sample per group, `{settings.kind}` gives every sample the advantage 0 ({chosen.single_sample})",
            f"set group_size to 2 or more, or set trainer.advantage.kind to {' or '.join(others)}",
        )
    default = AdvantageSettings.model_fields["std_eps"].default
    if "std_eps" not in chosen.keys and settings.std_eps != default:
        yield Fault(f"{ADVANTAGE_SECTION}.std_eps", f"has no effect with kind: {settings.kind}", "remove this key")
    yield from option_faults(chosen.options, settings, ADVANTAGE_SECTION, chosen.keys)
