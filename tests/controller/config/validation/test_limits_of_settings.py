"""Settings just inside and just outside of what can work, and settings of one section that judge another."""

from __future__ import annotations

from typing import Any

import pytest
from valid_config import make

from areal_like import limits
from controller.config.run_config import RunConfig
from controller.config.validation.run import cross_check


def changed(changes: dict[str, Any]) -> RunConfig:
    return make(**{key.replace(".", "__"): value for key, value in changes.items()})


OVERLONG = {"kind": "overlong", "options": {"max_tokens": 612, "soft_tokens": 100}}
ROWS = {"path": "rows.jsonl"}


@pytest.mark.parametrize(
    "changes",
    [
        {"metrics.tensorboard": True},
        {"metrics.prometheus": {"port": 0}, "launch.port": 0},
        {"metrics.prometheus": {"port": 5000}, "launch.port": 5001},
        {"group_size": 2, "trainer.advantage.kind": "rloo", "filter_zero_signal": True},
        {"group_size": 1, "trainer.advantage.kind": "global_norm"},
        {"mode": "sync"},
        {"mode": "sync", "staleness.max_staleness": 0},
        {"mode": "one_step_off", "staleness.max_staleness": 1, "rollout.interruption": "drain"},
        {"groups_per_step": 4, "trainer.mini_batches": 4},
        {"sampling.max_new_tokens": 2047, "eval.max_new_tokens": 2047},
        {"trainer.micro_batch_tokens": 2048},
        {"rollout.engine.max_context": 4096, "trainer.micro_batch_tokens": 4096},
        {"warm_start.data": {"generator": "running_sum"}, "warm_start.sft": {"micro_batch_tokens": 9, "max_tokens": 9}},
        {"data.train": {**ROWS, "columns": {"answer": None, "prompt": "question"}}},
        {"data.train": {**ROWS, "columns": {"answer": "solution"}, "template": "{{ a }}"}},
        {"data.train": {"dataset": "someone/rows", "split": "train", "config": "main"}},
        {"data.train": {"generator": "mine.data:rows", "options": {"hard": True}}},
        {"data.train": {"generator": "running_sum", "limit": limits.GENERATED_ROWS}},
        {"data.eval": None, "eval.every_steps": 0},
        {"trainer.loss.weight.mode": "mask", "trainer.loss.weight.low": 1.0, "trainer.loss.weight.max": 1.5},
        {"trainer.loss.weight.mode": "mask", "trainer.loss.weight.low": 0.5, "trainer.loss.weight.max": 1.0},
        {"trainer.loss.kind": "mine:loss", "trainer.loss.options": {"scale": 2}},
        {"launch.silence_s": 8.0, "launch.heartbeat_s": 2.0},
        {"reward.scorers": [{"kind": "mine:score"}, {"kind": "math", "weight": 0}]},
        {"sampling.max_new_tokens": 513, "reward.scorers": [{"kind": "math"}, OVERLONG]},
        {"trainer.weights": {"kind": "disk", "shared_dir": "/nfs"}},
        {"trainer.weights.swap": "rolling", "rollout.interruption": "recompute"},
        {"trainer.attention": "varlen", "trainer.device": "cuda", "rollout.engine.device": "cuda"},
        {"model.tokenizer": "characters:running_sum"},
        {"trainer.backend": "deepspeed", "trainer.deepspeed": {"stage": 3, "offload_param": True}},
        {"trainer.backend": "torch", "trainer.ranks": 1},
        {"warm_start.data": {"generator": "running_sum"}, "warm_start.sft.device": "cuda:1"},
    ],
    ids=str,
)
def test_settings_that_just_go_together_are_valid(changes: dict[str, Any]) -> None:
    assert [str(problem) for problem in cross_check(changed(changes))] == []


@pytest.mark.parametrize(
    ("changes", "keys", "words"),
    [
        ({"data.eval": {**ROWS, "columns": {"id": "a"}}}, ("data.eval.columns.id",), "own names"),
        ({"warm_start.data": {}}, ("warm_start.data",), "warm_start.data.path"),
        ({"data.train": {"path": ""}}, ("data.train.path",), "is empty"),
        ({"data.train": {**ROWS, "config": "main"}}, ("data.train.config",), "no effect with data.train.path"),
        ({"data.train": {**ROWS, "options": {"a": 1}}}, ("data.train.options",), "no effect with data.train.path"),
        ({"data.train": {"dataset": "a/b", "options": {"a": 1}}}, ("data.train.options",), "with data.train.dataset"),
        ({"data.train": {"generator": "running_sum", "config": "a"}}, ("data.train.config",), "data.train.generator"),
        ({"data.train": {"generator": "running_sum", "columns": {"answer": "a"}}}, ("data.train.columns",), "has no"),
        ({"data.train": {**ROWS, "columns": {"response": None}}}, ("data.train.columns.response",), "only `answer`"),
        ({"data.train": {**ROWS, "columns": {"prompt": "a", "messages": "b"}}}, ("data.train.columns",),
         "set only prompt or only messages"),
        ({"data.train": {**ROWS, "columns": {"prompt": "a"}, "template": "{{ b }}"}}, ("data.train.template",),
         "remove this key, or remove prompt and messages from"),
        ({"data.train": {**ROWS, "template": "{{ b"}}, ("data.train.template",), "not a valid Jinja template"),
        ({"data.train": {"generator": "running_sum", "limit": limits.GENERATED_ROWS + 1}}, ("data.train.limit",),
         f"set a limit of at most {limits.GENERATED_ROWS:,}"),
        ({"trainer.loss.options": {"scale": 2}}, ("trainer.loss.options.scale",), "remove this option"),
        ({"trainer.loss.kind": "cispo", "trainer.loss.dual_clip": 3.0}, ("trainer.loss.dual_clip",), "cispo"),
        ({"trainer.loss.proximal": "behaviour", "trainer.loss.weight.mode": "mask"},
         ("trainer.loss.weight.mode", "trainer.loss.proximal"), "`mask` has no effect"),
        ({"trainer.loss.weight.mode": "mask", "trainer.loss.weight.low": 2.0, "trainer.loss.weight.max": 2.0},
         ("trainer.loss.weight.low", "trainer.loss.weight.max"), "the window [2, 2] of `mask` keeps no tokens"),
        ({"trainer.loss.weight.mode": "mask", "trainer.loss.weight.low": 1.125, "trainer.loss.weight.max": 2.0},
         ("trainer.loss.weight.low", "trainer.loss.weight.max"), "does not contain 1"),
        ({"launch.silence_s": 7.5, "launch.heartbeat_s": 2.0}, ("launch.silence_s", "launch.heartbeat_s"), "least 8"),
        ({"reward.scorers": [{"kind": "math", "weight": 0}, {"kind": "mine:score", "weight": 0}]}, ("reward.scorers",),
         "every scorer has weight 0"),
        ({"reward.scorers": [{"kind": "math"}, {"kind": "zzzzzz"}]}, ("reward.scorers.1.kind",), "or module:function"),
        ({"sampling.max_new_tokens": 512, "reward.scorers": [{"kind": "math"}, OVERLONG]},
         ("reward.scorers.1.options.max_tokens", "sampling.max_new_tokens"), "begins at 512 tokens"),
        ({"trainer.weights": {"kind": "disk", "shared_dir": ""}}, ("trainer.weights.shared_dir",), "is empty"),
        ({"trainer.attention": "varlen"}, ("trainer.attention", "trainer.device"), "requires CUDA"),
        ({"model.init": None, "model.path": ""}, ("model.path",), "is empty"),
        ({"trainer.backend": "deepspeed", "trainer.deepspeed": {"stage": 2, "offload_param": True}},
         ("trainer.deepspeed.offload_param", "trainer.deepspeed.stage"), "ZeRO stage 2"),
        ({"trainer.backend": "torch", "trainer.ranks": 2}, ("trainer.ranks", "trainer.backend"), "trainer.ranks is 2"),
        ({"trainer.backend": "fsdp", "trainer.ranks": 3, "trainer.sequence_parallel": 2},
         ("trainer.sequence_parallel", "trainer.ranks"), "3 ranks cannot form groups of 2"),
        ({"trainer.backend": "deepspeed", "trainer.ranks": 2, "trainer.sequence_parallel": 2},
         ("trainer.sequence_parallel", "trainer.backend"), "deepspeed cannot split a sequence"),
        ({"trainer.backend": "fsdp", "trainer.ranks": 6, "trainer.fsdp.replicas": 4},
         ("trainer.fsdp.replicas", "trainer.ranks"), "6 ranks cannot form 4 groups of equal size"),
        ({"trainer.backend": "fsdp", "trainer.ranks": 4, "trainer.tensor_parallel": 3},
         ("trainer.tensor_parallel", "trainer.ranks"), "4 ranks cannot form groups of 3"),
        ({"trainer.backend": "fsdp", "trainer.ranks": 4, "trainer.fsdp.replicas": 4, "trainer.tensor_parallel": 2},
         ("trainer.tensor_parallel", "trainer.fsdp.replicas"), "a replica of 1 rank cannot form groups of 2"),
        ({"trainer.backend": "fsdp", "trainer.ranks": 4, "trainer.tensor_parallel": 2, "trainer.sequence_parallel": 2},
         ("trainer.tensor_parallel", "trainer.sequence_parallel"), "already share each micro-batch"),
        ({"trainer.backend": "fsdp", "trainer.ranks": 4, "trainer.tensor_parallel": 2, "trainer.lora": {}},
         ("trainer.tensor_parallel", "trainer.lora"), "an adapter cannot be trained"),
        ({"trainer.backend": "deepspeed", "trainer.ranks": 2, "trainer.tensor_parallel": 2},
         ("trainer.tensor_parallel", "trainer.backend"), "deepspeed cannot split matrices"),
        ({"trainer.backend": "torch", "trainer.fsdp.replicas": 2},
         ("trainer.fsdp.replicas", "trainer.backend"), "torch cannot keep 2 sharded copies"),
        ({"warm_start.data": {"generator": "running_sum"}, "warm_start.sft.device": "gpu"}, ("warm_start.sft.device",),
         "cuda:N"),
        ({"rollout.engine.device": "cuda:"}, ("rollout.engine.device",), "no device `cuda:`"),
        ({"rollout.workflow": "mine.Flow"}, ("rollout.workflow",), "module:Class"),
        ({"mode": "sync", "staleness.max_staleness": "unbounded"}, ("staleness.max_staleness", "mode"), "requires a"),
        ({"group_size": 1, "trainer.advantage.kind": "global_norm", "filter_zero_signal": True},
         ("filter_zero_signal", "group_size"), "filtered"),
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_just_do_not_go_together_are_one_problem_with_its_keys(
    changes: dict[str, Any], keys: tuple[str, ...], words: str
) -> None:
    (problem,) = cross_check(changed(changes))
    assert problem.keys[: len(keys)] == keys
    assert words in str(problem)


def test_samples_in_flight_are_bounded_by_what_their_states_take() -> None:
    """(1 + 1) * groups_per_step * group_size samples in flight."""
    groups = limits.SAMPLES_IN_FLIGHT // 16
    assert cross_check(make(groups_per_step=groups, group_size=8, staleness={"max_staleness": 1})) == []
    (problem,) = cross_check(make(groups_per_step=groups + 1, group_size=8, staleness={"max_staleness": 1}))
    assert problem.keys == ("groups_per_step", "group_size", "staleness.max_staleness")
    samples = 16 * (groups + 1)
    assert f"(max_staleness + 1) * groups_per_step * group_size allows {samples:,} samples in flight" in problem.what
    unbounded = {"max_staleness": "unbounded", "on_stale": "keep"}
    (problem,) = cross_check(make(groups_per_step=2 * groups + 1, group_size=8, staleness=unbounded))
    assert problem.what.startswith(f"groups_per_step * group_size allows {8 * (2 * groups + 1):,} samples")
