"""A loss and advantages of the user's are loaded by import path, trained with, and checked before a run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areal_like.errors import UserError
from trainer.backends.port import Setup
from trainer.backends.torch_single import TorchBackend
from trainer.check_objectives import check_objective
from trainer.config import AdvantageSettings, CorrectionSettings, LossSettings, TrainerSettings, WeightClip
from trainer.data.batch import prepare_batch
from trainer.model.attention import AttentionChoice
from trainer.objectives.advantage import advantages
from trainer.objectives.loss import policy_loss
from trainer.objectives.own_code import own_advantage, own_correction, own_objective
from trainer.objectives.port import Needs, Sequences, TokenInputs
from trainer.ranks import Ranks
from trainer.step import TrainStep, ready_model

TOY = "def toy(logprobs_N, tokens, *, scale=1.0):\n    return -scale * tokens.advantage_N * logprobs_N\n"
SEQUENCE_TOY = """
from areal_like.settings import Settings
from trainer.objectives.port import Needs, Objective, TokenLoss


class Options(Settings):
    bound: float = 1.5


def loss(current_N, tokens, options):
    ratio_S = tokens.sequences.mean(current_N - tokens.proximal_N).exp()
    ratio_N = tokens.sequences.spread(ratio_S)
    loss_N = -ratio_N.clamp(max=options.bound) * tokens.advantage_N
    return TokenLoss(
        loss_N,
        token_metrics={"clip_fraction": ratio_N > options.bound},
        sequence_metrics={"sequence_ratio": ratio_S},
    )


toy = Objective(name="toy", loss=loss, options=Options, needs=Needs(sequences=True))
"""
OFF: dict[str, Any] = {"proximal": "behaviour", "weight": WeightClip(mode="off")}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of the user's own, with modules that no file of ours names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("toy_losses", "toy_advantages"):
        sys.modules.pop(name, None)
    own_objective.cache_clear()
    own_advantage.cache_clear()
    own_correction.cache_clear()


def check_loss(*, has_critic: bool = False, **changes: Any) -> None:
    settings = LossSettings(kind="toy_losses:toy", **changes)
    check_objective(settings.kind, {"of": "loss", "has_critic": has_critic, **settings.model_dump(mode="json")})


def check_advantage(kind: str = "toy_advantages:toy", *, has_critic: bool = False, **changes: Any) -> None:
    settings = AdvantageSettings(kind=kind, **changes)
    check_objective(settings.kind, {"of": "advantage", "has_critic": has_critic, **settings.model_dump(mode="json")})


def test_toy_loss_takes_the_place_of_the_clipped_term() -> None:
    Path("toy_losses.py").write_text(TOY)
    settings = LossSettings(kind="toy_losses:toy", options={"scale": 2.0}, **OFF)
    current_N = torch.tensor([-0.5, -1.5], requires_grad=True)
    advantage_N, coefficient_N = torch.tensor([1.0, -3.0]), torch.tensor([0.25, 0.75])
    inputs = TokenInputs(torch.tensor([-0.4, -1.0]), advantage_N, torch.zeros(2), coefficient_N)
    loss, _ = policy_loss(current_N, torch.zeros(2), inputs, settings)
    loss.backward()
    assert torch.equal(current_N.grad, -2.0 * advantage_N * coefficient_N)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import no_such_thing", "cannot be imported"),
        ("", "has no attribute toy"),
        ("toy = 3", "is not callable"),
        ("def toy(x): return x", "failed on four tokens"),
        ("def toy(x, t): return x.mean()", "returned a tensor of shape [] for 4 tokens"),
        ("def toy(x, t): return t.advantage_N", "no gradient"),
        ("def toy(x, t): return x / 0.0", "not finite"),
        ("def toy(x, t): return x, {'mine': x.mean()}", "the metric mine: a tensor of shape [] for 4 tokens"),
        ("def toy(x, t): return x, {'entropy': x}", "the metric entropy, whose name is reserved"),
        (
            "from trainer.objectives.advantages.grpo import ADVANTAGE as toy",
            "is an Advantage, which cannot be used for trainer.loss.kind",
        ),
    ],
)
def test_mistake_in_a_loss_is_one_clear_error(source: str, words: str) -> None:
    Path("toy_losses.py").write_text(source)
    with pytest.raises(UserError) as caught:
        check_loss()
    assert words in caught.value.what


@pytest.mark.parametrize(
    ("source", "changes", "words"),
    [
        (TOY, {"options": {"scael": 2.0}}, "trainer.loss.options.scael: there is no such option"),
        ("def toy(x, t, *, scale): return x", {}, "trainer.loss.options.scale: is required"),
        (SEQUENCE_TOY, {"options": {"bound": "high"}}, "trainer.loss.options.bound: input should be a valid number"),
        (TOY, {"eps_high": 0.3}, "trainer.loss.eps_high: has no effect with kind: toy_losses:toy"),
        (TOY, {"dual_clip": 3.0}, "trainer.loss.dual_clip: has no effect"),
        (SEQUENCE_TOY.replace("Needs(", "Needs(values=True, "), {}, "requires the values of a critic"),
        (
            SEQUENCE_TOY.replace("Needs(", "Needs(proximal='behaviour', "),
            {},
            "trainer.loss.proximal: `toy_losses:toy` requires the policy that sampled the tokens",
        ),
    ],
)
def test_option_or_key_that_a_loss_cannot_use_is_named(source: str, changes: dict[str, Any], words: str) -> None:
    Path("toy_losses.py").write_text(source)
    with pytest.raises(UserError) as caught:
        check_loss(**changes)
    assert words in caught.value.what


@pytest.mark.parametrize("load", [own_objective, own_correction, own_advantage])
def test_module_that_one_of_our_packages_hides_is_named(load: Callable[[str], Any], folder: Path) -> None:
    (folder / "trainer.py").write_text("def toy(*_): ...")
    with pytest.raises(UserError, match="`trainer` is also the name of a package of areal_like"):
        load("trainer:toy")


def test_descriptors_are_taken_as_they_are_and_functions_get_one() -> None:
    Path("toy_losses.py").write_text(
        SEQUENCE_TOY + "\nfrom trainer.objectives.corrections.veto import CORRECTION as veto\n"
        "from trainer.objectives.advantages.rloo import ADVANTAGE as rloo\n"
        "def mine(*inputs, scale=2.0): return scale\n"
    )
    assert own_objective("toy_losses:toy").name == "toy"
    assert own_correction("toy_losses:veto").name == "veto"
    assert own_advantage("toy_losses:rloo").name == "rloo"
    loss, correction, advantage = (load("toy_losses:mine") for load in (own_objective, own_correction, own_advantage))
    assert (loss.name, correction.name, advantage.name) == ("toy_losses:mine", "mine", "toy_losses:mine")
    assert loss.needs == Needs(sequences=True, every_sequence=True)
    assert correction.needs == Needs(sequences=True)
    assert not advantage.is_within_group
    for one, number in ((loss, 2), (correction, 1), (advantage, 1)):
        assert list(one.options.model_fields) == ["scale"], number


def test_function_may_return_a_loss_a_pair_with_metrics_or_all_that_a_loss_can() -> None:
    Path("toy_losses.py").write_text(
        "from trainer.objectives.port import TokenLoss\n"
        "def plain(x, t): return x\n"
        "def pair(x, t): return x, {'m': x + 1}\n"
        "def whole(x, t): return TokenLoss(x, x + 2)\n"
        "def odd(x, t): return x, x\n"
    )
    results = {}
    for name in ("plain", "pair", "whole", "odd"):
        objective = own_objective(f"toy_losses:{name}")
        results[name] = objective.loss(torch.ones(2), None, objective.options())  # type: ignore[arg-type]
    assert torch.equal(results["plain"].policy_N, torch.ones(2))
    assert not results["plain"].token_metrics
    assert torch.equal(results["pair"].token_metrics["m"], torch.full((2,), 2.0))
    assert torch.equal(results["whole"].unweighted_N, torch.full((2,), 3.0))
    assert isinstance(results["odd"].policy_N, tuple), "what it means is the check's to refuse"


def test_toy_losses_pass_the_check() -> None:
    Path("toy_losses.py").write_text(TOY)
    check_loss(options={"scale": 2.0})


def test_descriptor_of_a_loss_passes_the_check() -> None:
    Path("toy_losses.py").write_text(SEQUENCE_TOY)
    check_loss(options={"bound": 2.0})


@pytest.mark.processes
def test_check_needs_no_torch_where_none_is_installed() -> None:
    Path("toy_losses.py").write_text(TOY)
    Path("toy_advantages.py").write_text("def toy(samples): return samples.rewards_B - 0.5")
    script = (
        "import sys\n"
        f"sys.path.append({str(Path.cwd())!r})\n"
        "class NoTorch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'torch': raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, NoTorch())\n"
        "import trainer.check_objectives as checks\n"
        "checks.find_spec = lambda name: None\n"
        "from trainer.config import AdvantageSettings, LossSettings\n"
        "checks.check_loss(LossSettings(kind='toy_losses:toy'))\n"
        "checks.check_advantage(AdvantageSettings(kind='toy_advantages:toy'))\n"
        "try: checks.check_loss(LossSettings(kind='toy_losses:toy', eps_low=0.1))\n"
        "except Exception as error: print(error)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "trainer.loss.eps_low: has no effect" in ended.stdout


@pytest.mark.parametrize(
    ("source", "options", "words"),
    [
        ("def mine(t, *, bound): return t.drift_N.abs() < bound", {"bound": 1.0}, None),
        ("def mine(t, *, bound): return t.drift_N.abs() < bound", {}, "corrections.0.options.bound: is required"),
        ("def mine(t): return t.drift_N.mean()", {}, "mine returned a tensor of shape [] for 4 tokens"),
        ("def mine(t): return t.no_such", {}, "a correction failed on four tokens (AttributeError"),
        ("def mine(t): return t.drift_N / 0", {}, "a correction returned a value that is not finite"),
        (
            "from trainer.objectives.losses.gspo import OBJECTIVE as mine",
            {},
            "is an Objective, which cannot be used for",
        ),
    ],
)
def test_correction_of_the_users_is_checked(source: str, options: dict[str, Any], words: str | None) -> None:
    Path("toy_losses.py").write_text(source)
    own = CorrectionSettings(kind="toy_losses:mine", options=options)
    section = LossSettings(corrections=(own,)).model_dump(mode="json")
    if words is None:
        check_objective("toy_losses:mine", {"of": "loss", **section})
        return
    with pytest.raises(UserError) as caught:
        check_objective("toy_losses:mine", {"of": "loss", **section})
    assert words in caught.value.what
    assert "trainer.loss.corrections" in str(caught.value)


# ---------------------------------------------------------------- in a step


def _trained(model: Any, settings: TrainerSettings, samples: Any) -> dict[str, float]:
    setup = Setup(settings, temperature=0.9, num_steps=10, attention=AttentionChoice("sdpa", "t"), ranks=Ranks.alone())
    ready_model(model, setup)
    step = TrainStep(TorchBackend(model, setup), setup, groups_per_step=8)
    return step.run(step.prepare(samples, version=3))


def test_step_refuses_a_loss_that_the_check_could_not_try(tiny_model: Callable[..., Any], make_samples: Any) -> None:
    Path("toy_losses.py").write_text("def toy(x, t): return x.mean()")
    settings = TrainerSettings(loss=LossSettings(kind="toy_losses:toy"))
    with pytest.raises(UserError, match="returned"):
        _trained(tiny_model(), settings, make_samples((2, 2)))


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_sequence_level_toy_loss_does_not_depend_on_the_cut_into_micro_batches(
    mini_batches: int, tiny_model: Callable[..., Any], make_samples: Any
) -> None:
    Path("toy_losses.py").write_text(SEQUENCE_TOY)
    loss, found = LossSettings(kind="toy_losses:toy", aggregation="sequence_mean"), []
    for tokens in (10_000, 64, 20):
        settings = TrainerSettings(micro_batch_tokens=tokens, mini_batches=mini_batches, loss=loss)
        found.append(_trained(tiny_model(), settings, make_samples((4, 2, 3, 4, 1))))
    assert found[0]["sequence_ratio"] == pytest.approx(1.0, abs=0.2)
    for other in found[1:]:
        for name in ("loss", "grad_norm", "clip_fraction", "sequence_ratio"):
            assert other[name] == pytest.approx(found[0][name], rel=2e-4, abs=1e-7), name


def test_metrics_of_a_loss_are_means_over_the_tokens_or_sequences_of_all_micro_batches_and_ranks() -> None:
    Path("toy_losses.py").write_text(SEQUENCE_TOY)
    settings = LossSettings(kind="toy_losses:toy", options={"bound": 1.1}, **OFF)

    def sums_of(shift: float, lengths: list[int]) -> Any:
        num = sum(lengths)
        zero_N = torch.zeros(num)
        ids_N = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        inputs = TokenInputs(zero_N, zero_N, zero_N, zero_N, sequences=Sequences(ids_N, len(lengths)))
        return policy_loss(zero_N + shift, zero_N, inputs, settings)[1]

    class TwoRanks:
        size = 2

        def __init__(self, other: Any) -> None:
            self._parts = [
                [part[k].double() for k in sorted(part)] for part in (other.sums, other.maxima, other.minima)
            ]

        def sum(self, values: torch.Tensor) -> torch.Tensor:
            return values + torch.stack(self._parts[0])

        def max(self, values: torch.Tensor) -> torch.Tensor:
            return torch.maximum(values, torch.stack(self._parts[1]))

        def min(self, values: torch.Tensor) -> torch.Tensor:
            return torch.minimum(values, torch.stack(self._parts[2]))

    mine = sums_of(0.0, [3, 2]).plus(sums_of(1.0, [1]))
    metrics = mine.over(TwoRanks(sums_of(1.0, [4]))).metrics(1)  # type: ignore[arg-type]
    assert metrics["clip_fraction"] == pytest.approx(5 / 10)
    assert metrics["sequence_ratio"] == pytest.approx((1 + 1 + np.e + np.e) / 4)


def test_loss_without_a_clip_reports_no_clip_fraction() -> None:
    Path("toy_losses.py").write_text(TOY)
    zero_N = torch.zeros(3)
    inputs = TokenInputs(zero_N, zero_N, zero_N, zero_N)
    _, sums = policy_loss(zero_N, zero_N, inputs, LossSettings(kind="toy_losses:toy"))
    assert "clip_fraction" not in sums.metrics(1)


# ---------------------------------------------------------------- advantages


def test_toy_advantage_of_the_users_is_trained_with(make_samples: Any) -> None:
    Path("toy_advantages.py").write_text(
        "import numpy as np\n"
        "def toy(samples, *, discount):\n"
        "    steps = [discount ** np.arange(n)[::-1] for n in samples.lengths_B]\n"
        "    return np.concatenate([r * s for r, s in zip(samples.rewards_B, steps)])\n"
    )
    own = AdvantageSettings(kind="toy_advantages:toy", options={"discount": 0.5})
    np.testing.assert_allclose(
        advantages(np.array([1.0, -2.0]), np.array([0, 0]), [2, 3], own), [0.5, 1.0, -0.5, -1.0, -2.0]
    )
    samples = make_samples((3, 2))
    prepared = prepare_batch(samples, 3, TrainerSettings(advantage=own, mini_batches=2))
    for micro_batch in (one for mini_batch in prepared.mini_batches for one in mini_batch):
        found = micro_batch.inputs.advantage_N.split(torch.bincount(micro_batch.packed.sequence_N).tolist())
        for advantage_N in found:
            want = advantage_N[-1] * 0.5 ** torch.arange(len(advantage_N)).flip(0)
            torch.testing.assert_close(advantage_N, want)
    check_advantage(options={"discount": 0.5})


VALUED = """
from trainer.objectives.port import Advantage


def errors(samples, options):
    return samples.token_rewards_N() - samples.values_N


def targets(samples, options):
    return errors(samples, options)[:TAKEN]


toy = Advantage("toy", errors, needs_values=True, targets=targets, is_within_group=False)
"""


def test_advantage_and_loss_of_the_users_that_need_values_pass_the_check_with_a_critic_only() -> None:
    Path("toy_advantages.py").write_text(VALUED.replace("TAKEN", "None"))
    reads = "loss_N = (tokens.values_N - tokens.target_N) * current_N + "
    Path("toy_losses.py").write_text(
        SEQUENCE_TOY.replace("Needs(", "Needs(values=True, ").replace("loss_N = -ratio_N", reads + "-ratio_N")
    )
    check_advantage(has_critic=True)
    check_loss(has_critic=True)
    for check in (check_advantage, check_loss):
        with pytest.raises(UserError, match="requires the values of a critic, but"):
            check()
    Path("toy_more.py").write_text(VALUED.replace("TAKEN", "3"))
    with pytest.raises(UserError, match=r"returned targets of shape \[3\] for 8 tokens"):
        check_advantage("toy_more:toy", has_critic=True)


@pytest.mark.parametrize(
    ("source", "options", "words"),
    [
        ("", {}, "has no attribute toy"),
        ("def toy(s): return 1.0", {}, "returned an array of shape [] for 4 samples with 8 tokens"),
        ("def toy(s): return s.rewards_B / 0", {}, "not finite"),
        ("def toy(s): return s.x", {}, "failed on four samples (AttributeError"),
        ("def toy(s, *, k): return s.rewards_B", {}, "trainer.advantage.options.k: is required"),
        ("def toy(s): return s.rewards_B", {"k": 1}, "trainer.advantage.options.k: there is no such option"),
        (
            "from trainer.objectives.losses.decoupled_ppo import OBJECTIVE as toy",
            {},
            "is an Objective, which cannot be used for",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
def test_mistake_in_an_advantage_is_one_clear_error(source: str, options: dict[str, Any], words: str) -> None:
    Path("toy_advantages.py").write_text(source)
    with pytest.raises(UserError) as caught:
        check_advantage(options=options)
    assert words in caught.value.what
