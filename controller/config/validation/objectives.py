"""Cross-checks of loss, advantages and critic, without importing torch or modules of the user.

Uses the descriptors of trainer/objectives and checks the window of the correction weight. A loss of the user is checked
in trainer/check_objectives.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from areal_like.import_path import is_import_path
from controller.config.backends import REGISTERED, backend_of
from controller.config.problems import Problem
from controller.config.run_config import RunConfig
from trainer.objectives import registry
from trainer.objectives.port import Fault
from trainer.objectives.registry import (
    ADVANTAGES,
    advantage_faults,
    advantage_of,
    corrects_for_sampling,
    loss_faults,
    reads_values,
)

PATH_FORM = "use the form module:function, for example my_package.losses:my_loss"
WITHIN_GROUP = frozenset(name for name, one in ADVANTAGES.items() if one.is_within_group)
"""Built-in advantages that compare a sample only with its own group."""


_RELATED = {
    "group_size": ("trainer.advantage.kind",),
    "trainer.loss.weight.mode": ("trainer.loss.proximal",),
    "trainer.loss.proximal": ("trainer.loss.weight.mode",),
}
"""The other key of a contradiction between two."""


def loss_problems(config: RunConfig) -> Iterator[Problem]:
    """Find problems of trainer.loss."""
    loss = config.trainer.loss
    if ":" in loss.kind and not is_import_path(loss.kind):
        yield Problem(("trainer.loss.kind",), f"`{loss.kind}` is not a valid import path", PATH_FORM)
    for number, one in enumerate(loss.corrections):
        if ":" in one.kind and not is_import_path(one.kind):
            yield Problem(
                (f"trainer.loss.corrections.{number}.kind",),
                f"`{one.kind}` is not a valid import path",
                PATH_FORM,
            )
    has_critic, has_versions = config.trainer.critic is not None, config.trainer.version_logprobs is not None
    is_free = is_for_any_policy(config)
    faults = loss_faults(loss, has_critic=has_critic, has_versions=has_versions, is_for_any_policy=is_free)
    yield from _as_problems(faults)
    yield from _version_problems(config)
    yield from _cosine_problems(config)
    if config.trainer.lr_by_ess is not None and config.emulation is not None:
        what = "emulated devices compute no log-probs, so answers have no importance weights"
        yield Problem(("trainer.lr_by_ess", "emulation"), what, "set trainer.lr_by_ess: null")
    yield from _window_problems(config)


def _version_problems(config: RunConfig) -> Iterator[Problem]:
    """Whether the trainer can compute under versions of before."""
    trainer, key = config.trainer, "trainer.version_logprobs"
    if trainer.version_logprobs is None:
        return
    if config.emulation is not None:
        yield Problem((key, "emulation"), "emulated devices compute no log-probs", f"set {key}: null")
    elif not backend_of(config).recalls_versions(trainer):
        able = [known.when_recalling for known in REGISTERED.values() if known.when_recalling]
        what = f"with these settings, {trainer.backend} cannot compute log-probs under earlier versions"
        yield Problem((key, "trainer.backend"), what, f"set trainer.backend: {', or '.join(able)}")


def _cosine_problems(config: RunConfig) -> Iterator[Problem]:
    """Whether gradients can be compared."""
    key = "trainer.gradient_cosine"
    if config.trainer.gradient_cosine is None:
        return
    if config.emulation is not None:
        yield Problem((key, "emulation"), "emulated devices compute no gradients", f"set {key}: null")
    elif not backend_of(config).gives_gradients:
        able = [name for name, known in REGISTERED.items() if known.gives_gradients]
        what = f"{config.trainer.backend} does not provide its gradients"
        yield Problem((key, "trainer.backend"), what, f"set trainer.backend to {' or '.join(able)}, or set {key}: null")


def _weight_problems(config: RunConfig) -> Iterator[Problem]:
    """Whether an advantage gets the weights and gradients of samples that it asks for."""
    trainer, kind = config.trainer, config.trainer.advantage.kind
    advantage = ADVANTAGES.get(kind)
    if advantage is None or not advantage.needs_starts or any(advantage_faults(trainer.advantage, config.group_size)):
        return
    key = "trainer.advantage.kind"
    if config.emulation is not None:
        what = "emulated devices compute no log-probs, so samples have no importance weights"
        yield Problem((key, "emulation"), what, f"set {key}: grpo")
        return
    if not advantage.needs_norms(advantage_of(trainer.advantage)[1]):
        return
    option = "trainer.advantage.options.gradient_norm"
    if trainer.ranks > 1:
        what = f"gradients are summed over {trainer.ranks} ranks, so the norm of a single sample's gradient is unknown"
        yield Problem((option, "trainer.ranks"), what, f"set {option}: length, or trainer.ranks: 1")
    elif not backend_of(config).gives_gradients:
        what = f"{trainer.backend} does not provide its gradients"
        yield Problem((option, "trainer.backend"), what, f"set {option}: length, or trainer.backend: torch")


def is_for_any_policy(config: RunConfig) -> bool:
    """Return whether the advantage's loss is defined for samples of any policy, so that it needs no weight."""
    return registry.is_for_any_policy(config.trainer.advantage)


def has_reference(config: RunConfig) -> bool:
    """Return whether the trainer keeps a reference model for the loss or a built-in advantage."""
    advantage = ADVANTAGES.get(config.trainer.advantage.kind)
    return config.trainer.loss.kl_coef > 0 or (advantage is not None and advantage.needs_reference)


def is_corrected(config: RunConfig) -> bool:
    """Return whether the loss corrects for the difference between engine and trainer."""
    return corrects_for_sampling(config.trainer.loss) or is_for_any_policy(config)


def advantage_problems(config: RunConfig) -> Iterator[Problem]:
    """Find problems of trainer.advantage."""
    advantage = config.trainer.advantage
    if ":" in advantage.kind and not is_import_path(advantage.kind):
        yield Problem(
            ("trainer.advantage.kind",),
            f"`{advantage.kind}` is not a valid import path",
            PATH_FORM,
        )
    has_critic = config.trainer.critic is not None
    has_teacher = config.trainer.teacher is not None
    faults = advantage_faults(advantage, config.group_size, has_critic=has_critic, has_teacher=has_teacher)
    yield from _as_problems(faults)
    yield from _weight_problems(config)
    yield from _pair_problems(config)
    built_in = ADVANTAGES.get(advantage.kind)
    if has_teacher and built_in is not None and not built_in.needs_teacher:
        what = f"this section is not used with trainer.advantage.kind: {advantage.kind}"
        users = " or ".join(name for name, one in ADVANTAGES.items() if one.needs_teacher)
        yield Problem(
            ("trainer.teacher", "trainer.advantage.kind"),
            what,
            f"set trainer.advantage.kind: {users}, or trainer.teacher: null",
        )


def _pair_problems(config: RunConfig) -> Iterator[Problem]:
    """Settings of trainer.loss that would change the loss of an advantage that is defined for samples of any policy."""
    loss, kind = config.trainer.loss, config.trainer.advantage.kind
    if not is_for_any_policy(config):
        return
    if loss.weight.mode != "off":
        what = (
            f"the advantage `{kind}` is defined for samples of any policy, and an importance weight would change its "
            "loss"
        )
        keys = ("trainer.loss.weight.mode", "trainer.advantage.kind")
        yield Problem(keys, what, 'set trainer.loss.weight.mode: "off"')
    if loss.aggregation in ("sequence_mean", "group_mean"):
        what = (
            f"the advantage `{kind}` compares sums over tokens, but {loss.aggregation} divides these by the number of "
            "tokens"
        )
        keys = ("trainer.loss.aggregation", "trainer.advantage.kind")
        yield Problem(keys, what, "set trainer.loss.aggregation to constant or token_mean")


def critic_problems(config: RunConfig) -> Iterator[Problem]:
    """Find problems of trainer.critic. Loss and advantage must be known."""
    trainer, critic = config.trainer, config.trainer.critic
    if critic is None:
        return
    is_known = trainer.advantage.kind in ADVANTAGES and not any(
        loss_faults(trainer.loss, has_critic=True, has_versions=True, is_for_any_policy=True)
    )
    if is_known and not reads_values(trainer.loss, trainer.advantage):
        what = (
            f"adds a critic, but neither the advantage {trainer.advantage.kind} nor the loss {trainer.loss.kind} uses "
            "its values"
        )
        yield Problem(
            ("trainer.critic", "trainer.advantage.kind"),
            what,
            "set trainer.advantage.kind: gae, or trainer.critic: null",
        )
    if critic.warmup_steps >= config.num_steps:
        yield Problem(
            ("trainer.critic.warmup_steps", "num_steps"),
            f"the first {critic.warmup_steps} steps train only the critic, but the run has only {config.num_steps} "
            "steps, so the policy would never be trained",
            f"set warmup_steps to less than {config.num_steps}",
        )
    backend = backend_of(config)
    if not backend.trains_critics:
        able = [name for name, known in REGISTERED.items() if known.trains_critics]
        what = f"{trainer.backend} cannot train a critic"
        yield Problem(("trainer.critic", "trainer.backend"), what, f"set trainer.backend to {' or '.join(able)}")
    if config.emulation is not None:
        yield Problem(("trainer.critic", "emulation"), "emulated devices cannot train a critic", "set critic: null")


def _as_problems(faults: Iterable[Fault]) -> Iterator[Problem]:
    for fault in faults:
        yield Problem((fault.key, *_RELATED.get(fault.key, ())), fault.what, fault.remedy)


def _window_problems(config: RunConfig) -> Iterator[Problem]:
    loss = config.trainer.loss
    window = ("trainer.loss.weight.low", "trainer.loss.weight.max")
    if loss.weight.mode == "mask" and loss.weight.low >= loss.weight.max:
        yield Problem(
            window,
            f"the window [{loss.weight.low:g}, {loss.weight.max:g}] of `mask` keeps no tokens",
            "set low below 1 and max above 1",
        )
    elif loss.weight.mode == "mask" and not loss.weight.low <= 1 <= loss.weight.max:
        yield Problem(
            window,
            f"the window [{loss.weight.low:g}, {loss.weight.max:g}] of `mask` does not contain 1, the weight of "
            "on-policy tokens",
            "set low below 1 and max above 1",
        )
