"""Claims about what the configuration of losses and advantages needs, and about what of it does not fit together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from areal_like.errors import UserError
from trainer.config import AdvantageSettings, CorrectionSettings, LossSettings, WeightClip
from trainer.objectives.port import Advantage, Needs, Objective, RewardedSamples, Sequences, TokenInputs
from trainer.objectives.registry import (
    ADVANTAGES,
    CORRECTIONS,
    OBJECTIVES,
    advantage_faults,
    advantage_of,
    corrects_for_sampling,
    loss_faults,
    loss_of,
    needs_reference,
)

OFF: dict[str, Any] = {"proximal": "behaviour", "weight": WeightClip(mode="off")}


def correction(kind: str, **options: Any) -> CorrectionSettings:
    return CorrectionSettings(kind=kind, options=options)


def use(section: Any, options: Any) -> None:
    """Compute with these options on eight tokens of three samples; whatever may be set gives finite numbers."""
    ids_N = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])
    behaviour_N = torch.linspace(-2.0, -0.1, 8)
    current_N = behaviour_N + torch.tensor([0.1, -0.2, 0.0, 0.3, -0.1, 0.05, 0.0, -0.4])
    tokens = TokenInputs(
        behaviour_N=behaviour_N, advantage_N=torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, 0.5, 0.5, 0.5]),
        staleness_N=torch.arange(8.0) % 3, coefficient_N=torch.full((8,), 0.125), proximal_N=behaviour_N,
        sequences=Sequences(ids_N, 3), is_cut_N=ids_N == 2, current_N=current_N, drift_N=current_N - behaviour_N,
        version_N=behaviour_N, mixture_N=behaviour_N,
    )  # fmt: skip
    if isinstance(section, Advantage):
        samples = RewardedSamples(
            np.array([0.0, 1.0, 3.0]), np.array([4, 4, 9]), np.array([3, 2, 3]), values_N=np.linspace(-1, 1, 8),
            end_values_Q=np.array([0.5, 0.0, 1.0]), turn_starts_N=np.isin(np.arange(8), [0, 2, 3, 5, 7]),
            is_cut_Q=np.array([False, False, True]), log_weights_B=np.array([0.1, -0.2, 0.0]),
            square_norms_B=np.array([1.0, 2.0, 0.5]), start_N=np.linspace(-2, -1, 8),
            reference_N=np.linspace(-1, -2, 8), teacher_N=np.linspace(-3, -1, 8),
        )  # fmt: skip
        assert np.isfinite(section.compute(samples, options)).all()
        return
    if section.statistics is not None:
        tokens = replace(tokens, step={section.name: section.statistics([tokens], list, options)})
    if isinstance(section, Objective):
        assert section.loss(current_N, tokens, options).policy_N.isfinite().all()
    else:
        assert len(section.factor(tokens, options)) == 8


# ---------------------------------------------------------------- options

TINY = 1e-9
OPTIONS: list[tuple[Any, str, Any, list[Any], list[Any]]] = [
    # section, option, its default (... where it is required), values that may be and that may not
    (CORRECTIONS["icepop"], "low", 0.5, [0.0, 0.99], [-TINY, 1.0]),
    (CORRECTIONS["icepop"], "high", 5.0, [1.01], [1.0, 0.0]),
    (CORRECTIONS["kpop"], "max_kl", ..., [TINY], [0.0]),
    (CORRECTIONS["veto"], "min_ratio", 1e-5, [TINY, 0.999], [0.0, 1.0]),
    (CORRECTIONS["veto"], "max_ratio", None, [1.001], [1.0]),
    (CORRECTIONS["geometric_mask"], "low", 0.99, [0.0, 0.999], [-TINY, 1.0]),
    (CORRECTIONS["geometric_mask"], "high", 1.01, [1.001], [1.0, 0.0]),
    (CORRECTIONS["sequence_rejection"], "low", 0.5, [0.0, 0.99], [-TINY, 1.0]),
    (CORRECTIONS["sequence_rejection"], "high", 2.0, [1.01], [1.0, 0.0]),
    (CORRECTIONS["kl_rejection"], "max_kl", ..., [TINY], [0.0]),
    (CORRECTIONS["kl_rejection"], "estimator", "k3", ["k2"], ["k1"]),
    (CORRECTIONS["kl_rejection"], "level", "sequence_mean", ["token", "sequence_sum", "sequence_max"], ["group"]),
    (CORRECTIONS["opsm"], "max_kl", ..., [TINY], [0.0]),
    (CORRECTIONS["m2po"], "max_second_moment", 0.04, [TINY], [0.0]),
    (CORRECTIONS["staleness_mask"], "max", ..., [0], [-1]),
    (CORRECTIONS["staleness_weight"], "decay", 0.9, [TINY, 0.999], [0.0, 1.0]),
    (CORRECTIONS["sequence_weight"], "max", 2.0, [TINY], [0.0]),
    (CORRECTIONS["sequence_weight"], "reduce", "sum", ["mean"], ["max"]),
    (CORRECTIONS["token_weight"], "max", 5.0, [TINY], [0.0]),
    (CORRECTIONS["balance_heuristic"], "max", 5.0, [TINY], [0.0]),
    (OBJECTIVES["decoupled_ppo"], "eps_low", 0.2, [0.0, 0.999], [-TINY, 1.0]),
    (OBJECTIVES["decoupled_ppo"], "eps_high", 0.2, [0.0, 9.0], [-TINY]),
    (OBJECTIVES["decoupled_ppo"], "dual_clip", None, [1.001], [1.0]),
    (OBJECTIVES["gspo"], "eps_low", 3e-4, [0.0, 0.999], [-TINY, 1.0]),
    (OBJECTIVES["gspo"], "eps_high", 4e-4, [0.0, 9.0], [-TINY]),
    (OBJECTIVES["cispo"], "max_ratio", 5.0, [TINY], [0.0]),
    (OBJECTIVES["sapo"], "temperature_positive", 1.0, [TINY], [0.0]),
    (OBJECTIVES["sapo"], "temperature_negative", 1.05, [TINY], [0.0]),
    (OBJECTIVES["dppo"], "max_increase", 0.2, [TINY, 1.0], [0.0, 1.001]),
    (OBJECTIVES["dppo"], "max_decrease", 0.2, [TINY, 1.0], [0.0, 1.001]),
    (OBJECTIVES["dppo"], "k2_coef", 1e-3, [0.0], [-TINY]),
    (OBJECTIVES["vespo"], "k_positive", 2.0, [TINY], [0.0]),
    (OBJECTIVES["vespo"], "lambda_positive", 3.0, [TINY], [0.0]),
    (OBJECTIVES["vespo"], "k_negative", 3.0, [TINY], [0.0]),
    (OBJECTIVES["vespo"], "lambda_negative", 2.0, [TINY], [0.0]),
    (OBJECTIVES["bapo"], "target_share", 0.5, [0.0, 1.0], [-TINY, 1.001]),
    (OBJECTIVES["bapo"], "low_start", 0.6, [0.0, 0.9], [-TINY, 0.901, 1.001]),
    (OBJECTIVES["bapo"], "low_end", 0.9, [0.6, 1.0], [0.599, 1.001]),
    (OBJECTIVES["bapo"], "low_step", 0.05, [TINY], [0.0]),
    (OBJECTIVES["bapo"], "high_start", 1.2, [1.0, 3.0], [0.999, 3.001]),
    (OBJECTIVES["bapo"], "high_end", 3.0, [1.2], [1.199, 0.999]),
    (OBJECTIVES["bapo"], "high_step", 0.05, [TINY], [0.0]),
    (OBJECTIVES["bapo"], "dual_clip", 3.0, [1.001], [1.0]),
    *((ADVANTAGES[kind], "std_eps", 1e-4, [TINY], [0.0])
      for kind in ("grpo", "global_norm", "lite_ppo", "reinforce_pp", "reinforce_pp_baseline", "gae", "turns")),
    (ADVANTAGES["opob"], "gradient_norm", "exact", ["length"], ["none"]),
    (ADVANTAGES["opob"], "max_weight", None, [TINY], [0.0]),
    (ADVANTAGES["distillation"], "coef", 1.0, [TINY], [0.0]),
    (ADVANTAGES["distillation"], "clip", 10.0, [TINY, None], [0.0]),
    (ADVANTAGES["distillation"], "reward_coef", 0.0, [TINY], [-TINY]),
    (ADVANTAGES["online_dpo"], "beta", 0.1, [TINY], [0.0]),
    (ADVANTAGES["online_dpo"], "loss", "sigmoid", ["ipo"], ["hinge"]),
    (ADVANTAGES["online_dpo"], "pairs", "all", ["best_worst"], ["some"]),
    (ADVANTAGES["turns"], "discount", 1.0, [0.0, 1.0], [-TINY, 1.001]),
    (ADVANTAGES["gae"], "gamma", 1.0, [TINY, 1.0], [0.0, 1.001]),
    (ADVANTAGES["gae"], "gae_lambda", 0.95, [0.0, 1.0], [-TINY, 1.001]),
    (ADVANTAGES["gae"], "target_lambda", None, [0.0, 1.0], [-TINY, 1.001]),
    (ADVANTAGES["gae"], "unit", "token", ["turn"], ["word"]),
    (ADVANTAGES["gae"], "bootstrap_cut", False, [True], ["perhaps"]),
    (ADVANTAGES["gae"], "normalise", True, [False], ["perhaps"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("section", "option", "default", "allowed", "refused"), OPTIONS, ids=[f"{one[0].name}.{one[1]}" for one in OPTIONS]
)
def test_option_has_the_default_and_the_bounds_of_its_method(
    section: Any, option: str, default: Any, allowed: list[Any], refused: list[Any]
) -> None:
    field = section.options.model_fields[option]
    assert field.is_required() if default is ... else field.default == default
    others = {name: 1.0 for name, one in section.options.model_fields.items() if one.is_required()}
    for value in allowed:
        options = section.options(**{**others, option: value})
        assert getattr(options, option) == value
        use(section, options)
    for value in refused:
        with pytest.raises(ValueError, match="validation error"):
            section.options(**{**others, option: value})


def test_every_option_has_its_claim() -> None:
    listed = {(section.name, option) for section, option, *_ in OPTIONS}
    sections = [*OBJECTIVES.values(), *CORRECTIONS.values(), *ADVANTAGES.values()]
    assert listed == {(section.name, option) for section in sections for option in section.options.model_fields}


# ---------------------------------------------------------------- needs


def test_losses_say_what_they_need_and_which_keys_they_read() -> None:
    for one in OBJECTIVES.values():
        use(one, one.options())
    needs = {name: one.needs_with(one.options()) for name, one in OBJECTIVES.items()}
    assert needs == {
        "decoupled_ppo": Needs(), "gspo": Needs(sequences=True), "cispo": Needs(), "sapo": Needs(),
        "dppo": Needs(proximal="behaviour", every_sequence=True),
        "vespo": Needs(proximal="behaviour", sequences=True), "bapo": Needs(proximal="behaviour"),
    }  # fmt: skip
    dppo = OBJECTIVES["dppo"]
    assert dppo.needs_with(dppo.options(k2_coef=0.0)) == Needs(proximal="behaviour")
    assert {name: one.keys for name, one in OBJECTIVES.items() if one.keys} == {
        "decoupled_ppo": ("eps_low", "eps_high", "dual_clip")
    }
    assert Needs() == Needs("any", False, False, False, False, False)


def test_corrections_say_what_they_need_and_which_is_an_importance_weight() -> None:
    by_sequence = {"veto", "geometric_mask", "sequence_rejection", "kl_rejection", "opsm", "sequence_weight"}
    for name, one in CORRECTIONS.items():
        use(one, one.options(**{key: 1.0 for key, field in one.options.model_fields.items() if field.is_required()}))
        is_mixture = name == "balance_heuristic"
        assert one.needs == Needs(sequences=name in by_sequence, versions=is_mixture, mixture=is_mixture), name
        assert one.is_weight == (name in ("sequence_weight", "token_weight", "balance_heuristic")), name
        assert one.part == ("staleness" if is_mixture else "both"), name
        assert one.is_of_ratio == (name not in ("no_eos_mask", "staleness_mask", "staleness_weight")), name
        assert (one.statistics is not None) == (name == "m2po"), name


def test_advantages_say_whether_they_compare_within_the_group_and_what_a_lone_sample_gets() -> None:
    over_the_batch = {"global_norm", "reinforce_pp", "reinforce_pp_baseline", "gae", "turns", "distillation"}
    without_group = {"global_norm", "reinforce_pp", "gae", "distillation"}
    for name, one in ADVANTAGES.items():
        use(one, one.options())
        assert one.is_within_group == (name not in over_the_batch), name
        assert bool(one.single_sample) == (name not in without_group), name
        assert one.needs_values == (name == "gae"), name
        assert one.needs_norms(one.options()) == (name == "opob"), name
        assert one.needs_starts == (name in {"opob", "distillation", "online_dpo"}), name
        assert one.needs_teacher == (name == "distillation"), name
        assert one.needs_reference == one.is_for_any_policy == (name == "online_dpo"), name
        assert one.keys == (("std_eps",) if "std_eps" in one.options.model_fields else ()), name


@pytest.mark.parametrize(
    ("changes", "needs"),
    [
        ({}, Needs()), ({"kind": "gspo"}, Needs(sequences=True)),
        ({"kl_coef": 0.1}, Needs(reference=True, every_sequence=True)),
        ({"kl_coef": 0.1, "kl_in": "reward"}, Needs(every_sequence=True)),
        ({"entropy_coef": 0.1}, Needs(entropy=True, every_sequence=True)),
        ({"corrections": (correction("veto"),)}, Needs(sequences=True)),
        ({"kind": "dppo", **OFF}, Needs(proximal="behaviour", every_sequence=True)),
        ({"kind": "dppo", "options": {"k2_coef": 0.0}, **OFF}, Needs(proximal="behaviour")),
    ],
)  # fmt: skip
def test_step_needs_what_any_part_of_the_loss_needs(changes: dict[str, Any], needs: Needs) -> None:
    assert loss_of(LossSettings(**changes)).needs == needs


@pytest.mark.parametrize("name", ["reference", "values", "entropy", "sequences"])
def test_need_of_a_correction_alone_is_a_need_of_the_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needy = replace(CORRECTIONS["icepop"], needs=Needs(**{name: True}))  # type: ignore[arg-type]
    monkeypatch.setitem(CORRECTIONS, "icepop", needy)  # type: ignore[arg-type]
    settings = LossSettings(corrections=(correction("staleness_weight"), correction("icepop")))
    assert loss_of(settings).needs == Needs(**{name: True})  # type: ignore[arg-type]
    assert needs_reference(settings, AdvantageSettings()) is (name == "reference")


def test_reference_model_is_needed_for_a_divergence_in_loss_or_reward() -> None:
    assert not needs_reference(LossSettings(), AdvantageSettings())
    assert needs_reference(LossSettings(kl_coef=1e-6), AdvantageSettings())
    assert needs_reference(LossSettings(kl_coef=0.1, kl_in="reward"), AdvantageSettings())
    assert needs_reference(LossSettings(), AdvantageSettings(kind="online_dpo"))


@pytest.mark.parametrize(
    ("changes", "is_corrected"),
    [
        ({}, True), ({"weight": WeightClip(mode="off")}, False), (OFF, False),
        ({"weight": WeightClip(mode="off"), "corrections": (correction("sequence_weight"),)}, True),
        ({"weight": WeightClip(mode="off"), "corrections": (correction("icepop"),)}, False),
        ({"proximal": "behaviour"}, False),
        ({"proximal": "behaviour", "corrections": (correction("sequence_weight"),)}, False),
        ({"kind": "dppo", **OFF}, True), ({"kind": "dppo", "options": {"unknown": 1}, **OFF}, False),
        ({"kind": "nothing"}, True), ({"kind": "mine:loss", **OFF}, False), ({"kind": "mine:loss"}, True),
        ({"weight": WeightClip(mode="off"), "corrections": (correction("mine:mask"),)}, False),
    ],
)  # fmt: skip
def test_importance_weight_makes_up_for_who_sampled(changes: dict[str, Any], is_corrected: bool) -> None:
    assert corrects_for_sampling(LossSettings(**changes)) is is_corrected


# ---------------------------------------------------------------- what does not fit together


def one_fault(**changes: Any) -> tuple[str, str, str]:
    (fault,) = loss_faults(LossSettings(**changes))
    assert fault.key.startswith("trainer.loss.")
    return fault.key.removeprefix("trainer.loss."), fault.what, fault.remedy


def test_settings_that_fit_have_no_fault() -> None:
    for changes in (
        {}, OFF, {"proximal": "interpolate"}, {"kl_coef": 0.1, "kl_estimator": "k1", "kl_in": "reward"},
        {"kl_coef": 0.1, "kl_estimator": "k2"}, {"corrections": (correction("veto"), correction("icepop"))},
        {"weight": WeightClip(mode="off"), "corrections": (correction("sequence_weight"),)},
        {"weight": WeightClip(mode="off"), "corrections": (correction("mine:weight"),)},
        {"kind": "mine:loss"}, {"eps_low": 0.1, "eps_high": 0.3, "dual_clip": 2.0},
        {"kind": "gspo", "options": {"eps_low": 1e-3}}, {"kind": "dppo", **OFF},
    ):  # fmt: skip
        assert list(loss_faults(LossSettings(**changes))) == [], changes  # type: ignore[arg-type]


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    key, what, remedy = one_fault(kind="nothing")
    assert (key, what) == ("kind", "there is no loss `nothing`")
    assert remedy == f"use {', '.join(OBJECTIVES)}, or module:function"
    key, what, remedy = one_fault(corrections=(correction("veto"), correction("nothing")))
    assert (key, what) == ("corrections.1.kind", "there is no correction `nothing`")
    assert remedy == f"use {', '.join(CORRECTIONS)}, or module:function"


def test_correction_that_is_there_twice_is_named_by_its_second_place() -> None:
    key, what, _ = one_fault(corrections=(correction("veto"), correction("icepop"), correction("veto")))
    assert (key, what) == ("corrections.2.kind", "`veto` is listed twice")


def test_key_that_the_loss_does_not_read_is_named_with_who_reads_it_or_where_it_belongs() -> None:
    key, what, remedy = one_fault(kind="cispo", eps_high=0.3)
    assert (key, what) == ("eps_high", "has no effect with kind: cispo")
    assert remedy == "remove this key, which is only used by decoupled_ppo"
    key, _, remedy = one_fault(kind="gspo", eps_low=0.001)
    assert (key, remedy) == ("eps_low", "set trainer.loss.options.eps_low: 0.001")
    assert one_fault(kind="sapo", dual_clip=3.0)[0] == "dual_clip"


def test_proximal_policy_that_the_loss_cannot_use_is_named_with_the_one_it_can() -> None:
    key, what, remedy = one_fault(kind="dppo")
    assert key == "proximal"
    assert what == "`dppo` requires the policy that sampled the tokens as its proximal policy, not `recompute`"
    assert remedy == "set proximal: behaviour with weight.mode: off"


def test_wrong_option_is_one_fault_and_nothing_is_said_of_what_follows_from_it() -> None:
    key, _, _ = one_fault(kind="dppo", options={"max_increase": 2.0})
    assert key == "options.max_increase"


def test_importance_weight_counts_once_and_only_where_there_is_something_to_weigh() -> None:
    key, what, _ = one_fault(proximal="behaviour")
    assert key == "weight.mode"
    assert what == "with proximal: behaviour, the weight exp(p - b) is always 1, so `truncate` has no effect"
    weigher = (correction("sequence_weight"),)
    key, what, _ = one_fault(corrections=weigher)
    assert (key, what) == ("weight.mode", "`sequence_weight` and weight.mode: truncate both weight by exp(p - b)")
    assert one_fault(corrections=weigher, **OFF)[0] == "proximal"
    key, what, _ = one_fault(weight=WeightClip(mode="off"))
    assert key == "weight.mode"
    assert what.startswith("with proximal: recompute and no weight, the loss is not decoupled")


def test_two_weights_name_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CORRECTIONS, "icepop", replace(CORRECTIONS["icepop"], is_weight=True))  # type: ignore[arg-type]
    both = (correction("sequence_weight"), correction("icepop"))
    key, what, _ = one_fault(weight=WeightClip(mode="off"), corrections=both)
    assert (key, what) == ("weight.mode", "`sequence_weight` and `icepop` both weight by exp(p - b)")


def test_divergence_settings_are_named_where_they_hold_nothing() -> None:
    key, what, _ = one_fault(kl_coef=0.1, kl_estimator="k1")
    assert key == "kl_estimator"
    assert "does not constrain the policy" in what
    for changes in ({"kl_estimator": "k2"}, {"kl_in": "reward"}):
        ((name, _),) = changes.items()
        assert one_fault(**changes)[:2] == (name, "has no effect with kl_coef: 0")


def test_loss_that_needs_a_critic_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    needy = replace(OBJECTIVES["cispo"], needs=Needs(values=True))
    monkeypatch.setitem(OBJECTIVES, "cispo", needy)  # type: ignore[arg-type]
    assert one_fault(kind="cispo")[:2] == (
        "kind",
        "`cispo` requires the values of a critic, but trainer.critic is not set",
    )


def test_loss_that_needs_recomputed_logprobs_refuses_others(monkeypatch: pytest.MonkeyPatch) -> None:
    needy = replace(OBJECTIVES["cispo"], needs=Needs(proximal="recompute"))
    monkeypatch.setitem(OBJECTIVES, "cispo", needy)  # type: ignore[arg-type]
    assert list(loss_faults(LossSettings(kind="cispo"))) == []
    key, what, remedy = one_fault(kind="cispo", proximal="interpolate")
    assert (key, remedy) == ("proximal", "set proximal: recompute")
    assert what == "`cispo` requires recomputed log-probs as its proximal policy, not `interpolate`"


# ---------------------------------------------------------------- advantages


def advantage_fault(group_size: int = 4, **changes: Any) -> tuple[str, str, str]:
    (fault,) = advantage_faults(AdvantageSettings(**changes), group_size)
    return fault


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_sample_alone_in_its_group_is_refused_where_its_advantage_is_0(kind: str) -> None:
    settings = AdvantageSettings(kind=kind)
    assert list(advantage_faults(settings, 2, has_critic=True, has_teacher=True)) == []
    alone = list(advantage_faults(settings, 1, has_critic=True, has_teacher=True))
    assert [fault.key for fault in alone] == (["group_size"] if ADVANTAGES[kind].single_sample else [])
    if alone:
        assert ADVANTAGES[kind].single_sample in alone[0].what
        assert (
            alone[0].remedy
            == "set group_size to 2 or more, or set trainer.advantage.kind to global_norm or reinforce_pp"
        )


def test_advantage_settings_without_effect_are_named() -> None:
    key, what, _ = advantage_fault(kind="nothing")
    assert (key, what) == ("trainer.advantage.kind", "there is no advantage estimator `nothing`")
    key, what, _ = advantage_fault(kind="rloo", std_eps=0.1)
    assert (key, what) == ("trainer.advantage.std_eps", "has no effect with kind: rloo")
    assert list(advantage_faults(AdvantageSettings(kind="grpo", std_eps=0.1), 4)) == []
    assert advantage_fault(kind="grpo", options={"x": 1})[0] == "trainer.advantage.options.x"
    assert list(advantage_faults(AdvantageSettings(kind="mine:advantage"), 1)) == []


def test_advantage_that_was_imported_is_checked_like_ours() -> None:
    critic = replace(ADVANTAGES["rloo"], needs_values=True, single_sample="")
    (fault,) = advantage_faults(AdvantageSettings(kind="mine:advantage"), 1, critic)
    assert fault.key == "trainer.advantage.kind"
    assert fault.what == "`mine:advantage` requires the values of a critic, but trainer.critic is not set"


def test_options_of_an_advantage_are_its_keys_in_the_section() -> None:
    advantage, options = advantage_of(AdvantageSettings(kind="grpo", std_eps=0.5))
    assert (advantage, options.std_eps) == (ADVANTAGES["grpo"], 0.5)
    with pytest.raises(UserError) as raised:
        advantage_of(AdvantageSettings(kind="grpo", options={"x": 1}))
    assert raised.value.where == "trainer.advantage.options.x"
