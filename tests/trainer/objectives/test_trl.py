"""Our losses, corrections and advantages equal TRL's own code on the same tensors, in float64.

TRL runs in an environment of its own (tests/fixtures/trl_side.py). The settings on both sides are the rows of the
table in docs/algorithms.md; where that table names a difference, it is stated here as a factor.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from ecosystem import REPOSITORY, interpreter_of

from trainer.config import AdvantageSettings, LossSettings
from trainer.objectives.advantage import advantages
from trainer.objectives.advantages import distillation, online_dpo
from trainer.objectives.aggregation import token_coefficients
from trainer.objectives.loss import policy_loss
from trainer.objectives.port import RewardedSamples, Sequences, TokenInputs
from trainer.offline.config import DpoSettings
from trainer.offline.objectives import bradley_terry_losses, preference_losses

LENGTHS, GROUP_SIZE, MAX_NEW = (3, 7, 1, 5, 4, 6), 3, 8
GROUPS = np.repeat([0, 1], GROUP_SIZE)
NUM, SIZE, VOCABULARY = sum(LENGTHS), len(LENGTHS), 9
OFF = {"mode": "off"}
POPULATION = (1 - 1 / GROUP_SIZE) ** 0.5
"""Deviation of a group as ours has it over TRL's, which divides by n - 1; in a batch likewise."""
Row = dict[str, Any]


def numbers() -> Row:
    """The tensors: log-probs b, p (start of the step), c and r (reference), entropies, advantages, rewards."""
    rng = np.random.default_rng(7)
    b = -rng.exponential(1.0, NUM)
    return {
        "lengths": list(LENGTHS), "group_size": GROUP_SIZE, "is_cut": [False, True, False, False, False, True],
        "b": b.tolist(), "p": (b + rng.normal(0, 0.3, NUM)).tolist(), "c": (b + rng.normal(0, 0.4, NUM)).tolist(),
        "r": (b + rng.normal(0, 0.5, NUM)).tolist(), "entropy": rng.exponential(1.0, NUM).tolist(),
        "advantages": [1.3, -0.7, 0.4, -1.1, 0.9, -0.2], "rewards": rng.normal(0, 1, SIZE).tolist(),
        "scores": rng.normal(0, 1, SIZE).tolist(), "logits": rng.normal(0, 1, (NUM, VOCABULARY)).tolist(),
        "teacher_logits": rng.normal(0, 1, (NUM, VOCABULARY)).tolist(),
        "older_logits": rng.normal(0, 1, (NUM, VOCABULARY)).tolist(),
    }  # fmt: skip


DATA = numbers()


@dataclass(frozen=True)
class Case:
    """Options of TRL's trainer, our section trainer.loss, how many times our loss is TRL's. given: other tensors."""

    theirs: Row
    ours: Row
    factor: float = 1.0
    given: Row = field(default_factory=dict)


BEHAVIOUR = {"given": {"p": DATA["b"]}}
"""TRL's old policy is the one that sampled."""
CLIP = {"epsilon": 0.1, "epsilon_high": 0.15}
OUR_CLIP = {"eps_low": 0.1, "eps_high": 0.15, "weight": OFF}
SAMPLED = {"loss_type": "dapo", "use_vllm": True, **CLIP}
"""Importance weights against the policy that sampled."""


def importance(mode: str, **bounds: float) -> Row:
    return {**SAMPLED, "vllm_importance_sampling_mode": mode} | {
        f"vllm_importance_sampling_clip_{end}": bound for end, bound in bounds.items()
    }


def corrected(*corrections: Row) -> Row:
    return {**OUR_CLIP, "corrections": corrections}


KEPT_TOKENS = sum(length for length, cut in zip(LENGTHS, DATA["is_cut"], strict=True) if not cut)
CASES: dict[str, Case] = {
    "dapo": Case({"loss_type": "dapo", **CLIP}, OUR_CLIP),
    "bnpo": Case({"loss_type": "bnpo", **CLIP}, OUR_CLIP),
    "grpo": Case({"loss_type": "grpo", **CLIP}, {**OUR_CLIP, "aggregation": "sequence_mean"}),
    "dr_grpo": Case(
        {"loss_type": "dr_grpo", "max_completion_length": MAX_NEW, **CLIP},
        {**OUR_CLIP, "aggregation": "constant", "constant_divisor": MAX_NEW},
    ),
    "dual clip": Case({"loss_type": "dapo", "delta": 1.2, **CLIP}, {**OUR_CLIP, "dual_clip": 1.2}),
    "gspo": Case(
        {"loss_type": "grpo", "importance_sampling_level": "sequence", **CLIP},
        {"kind": "gspo", "options": {"eps_low": 0.1, "eps_high": 0.15}, "weight": OFF, "aggregation": "sequence_mean"},
    ),
    "cispo": Case(
        {"loss_type": "cispo", "epsilon_high": 1.2}, {"kind": "cispo", "options": {"max_ratio": 1.2}, "weight": OFF}
    ),
    "sapo": Case(
        {"loss_type": "sapo", "sapo_temperature_pos": 1.5, "sapo_temperature_neg": 2.5},
        {"kind": "sapo", "options": {"temperature_positive": 1.5, "temperature_negative": 2.5}, "weight": OFF,
         "aggregation": "sequence_mean"},
    ),
    "vespo": Case(
        {"loss_type": "vespo", "vespo_k_pos": 1.5, "vespo_lambda_pos": 2.5, "vespo_k_neg": 2, "vespo_lambda_neg": 1.5},
        {"kind": "vespo", "proximal": "behaviour", "weight": OFF,
         "options": {"k_positive": 1.5, "lambda_positive": 2.5, "k_negative": 2.0, "lambda_negative": 1.5}},
        **BEHAVIOUR,
    ),
    "ordinary PPO": Case({"loss_type": "dapo", **CLIP}, {**OUR_CLIP, "proximal": "behaviour"}, **BEHAVIOUR),
    "token_truncate": Case(importance("token_truncate", max=1.2), {**OUR_CLIP, "weight": {"max": 1.2}}),
    "token_mask": Case(
        importance("token_mask", min=0.8, max=1.3), {**OUR_CLIP, "weight": {"mode": "mask", "low": 0.8, "max": 1.3}}
    ),
    "sequence_truncate": Case(
        importance("sequence_truncate", max=1.5), corrected({"kind": "sequence_weight", "options": {"max": 1.5}})
    ),
    "sequence_mask": Case(
        importance("sequence_mask", max=1.5),
        corrected({"kind": "sequence_weight", "options": {"max": 1.5}},
                  {"kind": "sequence_rejection", "options": {"low": 0, "high": 1.5}}),
    ),
    "importance weights with grpo": Case(
        {**importance("token_truncate", max=1.2), "loss_type": "grpo"},
        {**OUR_CLIP, "weight": {"max": 1.2}, "aggregation": "sequence_mean"},
    ),
    "off-policy mask": Case(
        {**SAMPLED, "vllm_importance_sampling_correction": False, "off_policy_mask_threshold": 0.05},
        corrected({"kind": "opsm", "options": {"max_kl": 0.05}}),
    ),
    "truncated answers": Case(
        {"loss_type": "dapo", "mask_truncated_completions": True, **CLIP}, corrected({"kind": "no_eos_mask"}),
        factor=KEPT_TOKENS / NUM,
    ),
    "KL": Case(
        {"loss_type": "dapo", "beta": 0.1, "use_bias_correction_kl": False, **CLIP}, {**OUR_CLIP, "kl_coef": 0.1}
    ),
    "entropy": Case({"loss_type": "dapo", "entropy_coef": 0.01, **CLIP}, {**OUR_CLIP, "entropy_coef": 0.01}),
}  # fmt: skip
ADVANTAGES: dict[str, tuple[str, Row, Row, float]] = {
    "none": ("GRPO", {"scale_rewards": "none"}, {"kind": "grpo_no_std"}, 1.0),
    "group": ("GRPO", {"scale_rewards": "group"}, {"kind": "grpo", "std_eps": 1e-4 * POPULATION}, 1 / POPULATION),
    "batch": (
        "GRPO", {"scale_rewards": "batch"},
        {"kind": "lite_ppo", "std_eps": 1e-4 * (1 - 1 / SIZE) ** 0.5}, (1 - 1 / SIZE) ** -0.5,
    ),
    "rloo": ("RLOO", {"beta": 0.0}, {"kind": "rloo"}, 1.0),
}  # fmt: skip
"""TRL's trainer and options, our section trainer.advantage, and how many times ours is TRL's."""
PAIRS: dict[str, tuple[Row, Row]] = {
    "sigmoid": ({"loss_type": ["sigmoid"], "beta": 0.3}, {"loss": "sigmoid", "beta": 0.3}),
    "ipo": ({"loss_type": ["ipo"], "beta": 0.3}, {"loss": "ipo", "beta": 0.3}),
}
ONLINE_PAIRS: dict[str, tuple[Row, Row]] = {
    "sigmoid": ({"loss_type": "sigmoid", "beta": 0.3}, {"loss": "sigmoid", "beta": 0.3}),
    "ipo": ({"loss_type": "ipo", "beta": 0.3}, {"loss": "ipo", "beta": 0.3}),
}
DISTILLATIONS: dict[str, tuple[Row, float]] = {"GKD": ({"beta": 1.0, "lmbda": 1.0}, 1e-6), "Distillation": ({}, 1e-5)}
"""TRL's trainers and options, and the tolerance: DistillationTrainer computes in float32."""


@pytest.fixture(scope="module")
def trl() -> dict[str, Row]:
    """What TRL computes: loss, gradient and advantages by name."""
    cases = {name: ("GRPO", {"beta": 0.0, **case.theirs}, case.given) for name, case in CASES.items()}
    cases |= {f"advantage {name}": (one[0], one[1], {}) for name, one in ADVANTAGES.items()}
    cases |= {f"pairs {name}": ("DPO", theirs, {}) for name, (theirs, _) in PAIRS.items()}
    cases |= {f"online pairs {name}": ("OnlineDPO", theirs, {}) for name, (theirs, _) in ONLINE_PAIRS.items()}
    cases |= {name: (name, theirs, {}) for name, (theirs, _) in DISTILLATIONS.items()}
    cases |= {"reward model": ("Reward", {"center_rewards_coefficient": None}, {})}
    command = [interpreter_of("trl"), "-P", str(REPOSITORY / "tests" / "fixtures" / "trl_side.py")]
    job = json.dumps({"data": DATA, "cases": cases})
    done = subprocess.run(command, input=job, capture_output=True, text=True, check=False, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    found: dict[str, Row] = json.loads(done.stdout.splitlines()[-1])
    return found


def tensor(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.processes
@pytest.mark.parametrize("name", CASES)
def test_a_loss_and_its_gradients_equal_trls(trl: dict[str, Row], name: str) -> None:
    case = CASES[name]
    settings, data = LossSettings.model_validate(case.ours), DATA | case.given
    lengths = torch.tensor(LENGTHS)
    inputs = TokenInputs(
        behaviour_N=tensor(data["b"]),
        advantage_N=tensor(data["advantages"]).repeat_interleave(lengths),
        staleness_N=torch.zeros(NUM),
        coefficient_N=tensor(token_coefficients(LENGTHS, GROUPS.tolist(), settings)).repeat_interleave(lengths),
        proximal_N=tensor(data["p"]), reference_N=tensor(data["r"]),
        is_cut_N=torch.tensor(data["is_cut"]).repeat_interleave(lengths),
        sequences=Sequences(torch.repeat_interleave(torch.arange(SIZE), lengths), SIZE),
    )  # fmt: skip
    current_N, entropy_N = tensor(data["c"]).requires_grad_(), tensor(data["entropy"]).requires_grad_()
    loss, _ = policy_loss(current_N, entropy_N, inputs, settings)
    loss.backward()
    assert loss.item() == pytest.approx(case.factor * trl[name]["loss"], rel=1e-6, abs=1e-12)
    close(current_N.grad, case.factor * np.array(trl[name]["gradient"]))
    assert np.abs(trl[name]["gradient"]).max() > 0
    if settings.entropy_coef:
        close(entropy_N.grad, trl[name]["entropy_gradient"])


@pytest.mark.processes
@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_equal_trls(trl: dict[str, Row], name: str) -> None:
    _, _, ours, factor = ADVANTAGES[name]
    found_B = advantages(np.array(DATA["rewards"]), GROUPS, LENGTHS, AdvantageSettings.model_validate(ours))
    close(found_B, factor * np.array(trl[f"advantage {name}"]["advantages"]))


@pytest.mark.processes
@pytest.mark.parametrize("name", PAIRS)
def test_losses_of_pairs_equal_trls(trl: dict[str, Row], name: str) -> None:
    """The first half of the samples is chosen, the second half rejected."""
    settings = DpoSettings.model_validate(PAIRS[name][1])
    current_N = tensor(DATA["c"]).requires_grad_()
    reduce = torch.mean if settings.loss == "ipo" else torch.sum
    current, reference = (
        [reduce(part) for part in values_N.split(LENGTHS)] for values_N in (current_N, tensor(DATA["r"]))
    )
    half = SIZE // 2
    parts = (current[:half], current[half:], reference[:half], reference[half:])
    loss = preference_losses(*(torch.stack(part) for part in parts), settings).mean()
    loss.backward()
    assert loss.item() == pytest.approx(trl[f"pairs {name}"]["loss"], rel=1e-6)
    close(current_N.grad, trl[f"pairs {name}"]["gradient"])


@pytest.mark.processes
def test_the_loss_of_a_reward_model_equals_trls(trl: dict[str, Row]) -> None:
    scores_B = tensor(DATA["scores"]).requires_grad_()
    loss = bradley_terry_losses(*scores_B.chunk(2)).mean()
    loss.backward()
    assert loss.item() == pytest.approx(trl["reward model"]["loss"], rel=1e-6)
    close(scores_B.grad, trl["reward model"]["gradient"])


@pytest.mark.processes
@pytest.mark.parametrize("name", ONLINE_PAIRS)
def test_the_gradient_of_online_dpo_equals_trls(trl: dict[str, Row], name: str) -> None:
    """Ours is of the first update of a step; TRL takes one update. Samples i and 3 + i answer the same prompt."""
    options = {**ONLINE_PAIRS[name][1], "pairs": "best_worst"}
    prompts_B = np.tile(np.arange(SIZE // 2), 2)
    samples = RewardedSamples(
        np.array(DATA["rewards"]), prompts_B, np.array(LENGTHS), start_N=np.array(DATA["c"]),
        reference_N=np.array(DATA["r"]),
    )  # fmt: skip
    parsed = online_dpo.Options.model_validate(options)
    settings = LossSettings.model_validate({"aggregation": "constant", "weight": OFF})
    current_N = tensor(DATA["c"]).requires_grad_()
    inputs = TokenInputs(
        behaviour_N=tensor(DATA["b"]),
        advantage_N=tensor(np.repeat(online_dpo.compute(samples, parsed), LENGTHS)),
        staleness_N=torch.zeros(NUM),
        coefficient_N=tensor(np.repeat(token_coefficients(LENGTHS, prompts_B.tolist(), settings), LENGTHS)),
        proximal_N=tensor(DATA["c"]),
    )
    policy_loss(current_N, torch.zeros(NUM), inputs, settings)[0].backward()
    theirs = trl[f"online pairs {name}"]
    close(current_N.grad, theirs["gradient"])
    assert np.abs(theirs["gradient"]).min() > 0
    ours = online_dpo.metrics(samples, parsed)
    assert parsed.beta * ours["dpo_margin"] == pytest.approx(theirs["margins"], rel=1e-6)
    assert ours["dpo_accuracy"] == pytest.approx(theirs["accuracies"], rel=1e-6)


@pytest.mark.processes
@pytest.mark.parametrize("is_stale", [False, True])
@pytest.mark.parametrize("name", DISTILLATIONS)
def test_the_expected_gradient_of_distillation_equals_trls(trl: dict[str, Row], name: str, is_stale: bool) -> None:
    """Every token of the vocabulary once, with the probability with which it is sampled. is_stale: by another policy,
    whose tokens get an importance weight."""
    settings = LossSettings.model_validate({"weight": {"mode": "exact"}})
    logits_NV = tensor(DATA["logits"]).requires_grad_()
    current_NV = torch.log_softmax(logits_NV, 1)
    start_NV = current_NV.detach()
    behaviour_NV = torch.log_softmax(tensor(DATA["older_logits"]), 1) if is_stale else start_NV
    samples = RewardedSamples(
        np.zeros(NUM), np.arange(NUM), np.full(NUM, VOCABULARY), start_N=start_NV.flatten().numpy(),
        teacher_N=torch.log_softmax(tensor(DATA["teacher_logits"]), 1).flatten().numpy(),
    )  # fmt: skip
    advantage_N = tensor(distillation.compute(samples, distillation.Options()))
    share_N = tensor(np.repeat(token_coefficients(LENGTHS, GROUPS.tolist(), settings), LENGTHS))
    inputs = TokenInputs(
        behaviour_N=behaviour_NV.flatten(),
        advantage_N=advantage_N,
        staleness_N=torch.zeros(NUM * VOCABULARY),
        coefficient_N=(share_N[:, None] * behaviour_NV.exp()).flatten(),
        proximal_N=start_NV.flatten(),
    )
    policy_loss(current_NV.flatten(), torch.zeros(NUM * VOCABULARY), inputs, settings)[0].backward()
    tolerance = DISTILLATIONS[name][1]
    close(logits_NV.grad, trl[name]["gradient"], tolerance)
    divergence = -(share_N[:, None] * start_NV.exp()).flatten() @ advantage_N
    assert divergence.item() == pytest.approx(trl[name]["loss"], rel=tolerance)


def close(ours: Any, theirs: Any, tolerance: float = 1e-6) -> None:
    np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=tolerance, atol=1e-3 * tolerance)
