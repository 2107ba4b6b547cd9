"""Contradictions, derived numbers, and what a machine may lack."""

from __future__ import annotations

import json
import socket
import struct
from pathlib import Path
from typing import Any

import pytest
from valid_config import QWEN, config_of, make

from areal_like.config import dump_yaml
from areal_like.errors import UserError
from controller.config import model_folder
from controller.config.derived import advise, derive, kv_cache_bytes
from controller.config.loading import build, load_config, shipped_configs
from controller.config.validation.run import cross_check, is_loopback
from controller.preflight import machine, packages, preflight
from controller.run_folder.units import size_text
from controller.telemetry import sink_kinds
from services.reward.sandbox import demands


def test_sink_whose_package_is_absent_is_refused_with_its_extra(monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sink_kinds, "find_spec", lambda name: None)
        config = make(metrics__tensorboard=True, metrics__wandb={}, metrics__prometheus={"port": 0})
        words = [str(problem) for problem in preflight.look(config, "validate").problems]
        for name in ("tensorboard", "wandb", "prometheus"):
            assert any(f"metrics.{name}" in word and f"areal-like[{name}]" in word for word in words), words
        assert preflight.look(make(), "validate").problems == []


def test_machine_without_a_sandbox_for_programs_is_reported_before_the_start(monkeypatch) -> None:
    monkeypatch.setattr(demands, "sandbox_problem", lambda *arguments: "landlock: this kernel has no Landlock")
    config = load_config("quickstart", ["reward.scorers=[{kind: code}]"]).config
    found = [problem for problem in preflight.look(config, "validate").absent if "require" in problem.keys[0]]
    (problem,) = found
    assert problem.keys == ("reward.scorers.0.options.require",)
    assert "this kernel has no Landlock" in problem.what
    assert "apt install bubblewrap" in problem.remedy


def test_port_of_the_metrics_in_use_is_found_before_the_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = make(metrics__prometheus={"port": taken.getsockname()[1]})
        assert "metrics.prometheus.port" in str(preflight.look(config, "validate").absent[0])


def test_metrics_listen_on_loopback_unless_reported_otherwise() -> None:
    assert make(metrics__prometheus={}).metrics.prometheus.host == "127.0.0.1"
    assert cross_check(make(metrics__prometheus={"host": "0.0.0.0"})) == [], "said explicitly"


def test_the_ground_the_cases_change_has_no_contradiction() -> None:
    assert cross_check(make()) == []


AGENT = {"rollout.workflow": "agent", "rollout.workflow_options": {"command": ["python", "agent.py"]}}
CALLING = {"rollout.workflow": "tools", "reward.environment": {"kind": "tools", "options": {"tools": ["python"]}}}
GUESSING = {"rollout.workflow": "environment", "reward.scorers": [], "reward.environment": {"kind": "guess_number"}}


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"metrics.tensorboard": ""}, "metrics.tensorboard", "a folder"),
        ({"metrics.prometheus": {"port": 5000}, "launch.port": 5000}, "metrics.prometheus.port", "a different port"),
        ({"sampling.top_p": 0.9}, "sampling.top_p", "eval.top_p"),
        ({"sampling.top_k": 5}, "sampling.top_k", "eval.top_k"),
        ({"group_size": 1}, "group_size", "standard deviation"),
        ({"group_size": 1, "trainer.advantage.kind": "rloo"}, "group_size", "no other sample"),
        ({"group_size": 1, "trainer.advantage.kind": "grpo_no_std"}, "group_size", "its own mean"),
        (
            {"group_size": 1, "trainer.advantage.kind": "global_norm", "filter_zero_signal": True},
            "filter_zero_signal",
            "every group would be filtered",
        ),
        ({"trainer.advantage.kind": "gae"}, "trainer.advantage.kind", "-> trainer.critic: {}"),
        (
            {"trainer.critic": {}},
            "trainer.critic",
            "neither the advantage grpo nor the loss decoupled_ppo uses its values",
        ),
        (
            {"trainer.critic": {"warmup_steps": 10_000}, "trainer.advantage.kind": "gae"},
            "trainer.critic.warmup_steps",
            "steps train only the critic",
        ),
        (
            {"trainer.critic": {}, "trainer.advantage.kind": "gae", "trainer.advantage.options": {"unit": "step"}},
            "trainer.advantage.options.unit",
            "'token' or 'turn'",
        ),
        (
            {"trainer.critic": {}, "trainer.advantage.kind": "gae", "emulation": {}},
            "trainer.critic",
            "emulated devices cannot train a critic",
        ),
        ({"trainer.lora": {"targets": []}}, "trainer.lora.targets", "nothing would be trained"),
        (
            {"warm_start": {"data": {"generator": "running_sum"}, "sft": {"lora": {"targets": []}}}},
            "warm_start.sft.lora.targets",
            "nothing would be trained",
        ),
        (
            {"trainer.lora": {}, "trainer.backend": "deepspeed", "trainer.ranks": 2},
            "trainer.lora",
            "deepspeed cannot train an adapter -> set trainer.backend to torch or fsdp or auto, or set lora: null",
        ),
        ({"trainer.lora": {}, "emulation": {}}, "trainer.lora", "emulated devices cannot train an adapter"),
        ({"trainer.lr_by_ess": {}, "emulation": {}}, "trainer.lr_by_ess", "compute no log-probs"),
        ({"trainer.version_logprobs": {}, "emulation": {}}, "trainer.version_logprobs", "compute no log-probs"),
        (
            {"trainer.version_logprobs": {}, "trainer.backend": "deepspeed", "trainer.deepspeed": {"stage": 3}},
            "trainer.version_logprobs",
            "deepspeed with trainer.deepspeed.stage: 1 or 2",
        ),
        ({"trainer.loss.proximal": "version"}, "trainer.loss.proximal", "trainer.version_logprobs: {}"),
        ({"trainer.gradient_cosine": {}, "emulation": {}}, "trainer.gradient_cosine", "compute no gradients"),
        (
            {"trainer.gradient_cosine": {}, "trainer.backend": "deepspeed"},
            "trainer.gradient_cosine",
            "deepspeed does not provide its gradients",
        ),
        (
            {"trainer.advantage.kind": "opob", "trainer.backend": "fsdp", "trainer.ranks": 2},
            "trainer.advantage.options.gradient_norm",
            "gradients are summed over 2 ranks",
        ),
        (
            {"trainer.advantage.kind": "opob", "trainer.backend": "deepspeed"},
            "trainer.advantage.options.gradient_norm",
            "does not provide its gradients",
        ),
        (
            {"trainer.advantage.kind": "opob", "emulation": {}},
            "trainer.advantage.kind",
            "samples have no importance weights",
        ),
        ({"trainer.advantage.kind": "distillation"}, "trainer.advantage.kind", "trainer.teacher: {path: FOLDER}"),
        ({"trainer.teacher": {"path": "t"}}, "trainer.teacher", "is not used with trainer.advantage.kind: grpo"),
        (
            {"trainer.advantage.kind": "online_dpo", "trainer.loss.aggregation": "constant"},
            "trainer.loss.weight.mode",
            "an importance weight would change its loss",
        ),
        (
            {
                "trainer.advantage.kind": "online_dpo",
                "trainer.loss.weight.mode": "off",
                "trainer.loss.aggregation": "group_mean",
            },
            "trainer.loss.aggregation",
            "compares sums over tokens",
        ),
        (
            {
                "trainer.advantage.kind": "online_dpo",
                "trainer.loss.weight.mode": "off",
                "trainer.loss.aggregation": "constant",
                "trainer.critic": {},
            },
            "trainer.critic",
            "adds a critic, but neither the advantage online_dpo nor the loss decoupled_ppo uses its values",
        ),
        ({"dynamic_batch": {"max_attempts": 64}}, "dynamic_batch", "filter_zero_signal: true"),
        (
            {"dynamic_batch": {"max_attempts": 2}, "filter_zero_signal": True, "groups_per_step": 4},
            "dynamic_batch.max_attempts",
            "a step has 4 groups",
        ),
        (
            {"dynamic_batch": {"max_attempts": 64, "min_groups": 9}, "filter_zero_signal": True, "groups_per_step": 4},
            "dynamic_batch.min_groups",
            "fewer than 9",
        ),
        (
            {"trainer.lora": {"publish": "adapter"}, "trainer.weights.kind": "distributed"},
            "trainer.lora.publish",
            "publish: merged",
        ),
        (
            {"replay_buffer": {"groups_per_step": 2, "max_age": 3}, "staleness.max_staleness": 2},
            "replay_buffer.max_age",
            "set max_age to at most 2, or set max_staleness to 3 or more",
        ),
        (
            {"replay_buffer": {"groups_per_step": 2, "max_age": 3}, "staleness.max_staleness": 0},
            "replay_buffer.max_age",
            "set max_staleness to 3 or more",
        ),
        (
            {"replay_buffer": {"groups_per_step": 2, "max_age": 3}, "mode": "sync"},
            "replay_buffer.max_age",
            "set mode: async, and set max_staleness to 3 or more",
        ),
        ({"staleness.max_staleness": -1}, "staleness.max_staleness", "use 0 for synchronous RL"),
        ({"staleness.max_staleness": "unbounded"}, "staleness.on_stale", "on_stale: keep"),
        (
            {"staleness.max_staleness": "unbounded", "staleness.on_stale": "drop"},
            "staleness.on_stale",
            "exceed the staleness bound",
        ),
        ({"mode": "sync", "staleness.max_staleness": 1}, "staleness.max_staleness", "mode: async"),
        ({"mode": "one_step_off", "staleness.max_staleness": "unbounded"}, "staleness.max_staleness", "of 1"),
        ({"mode": "one_step_off", "rollout.interruption": "recompute"}, "rollout.interruption", "drain"),
        ({"trainer.loss.weight.mode": "off"}, "trainer.loss.weight.mode", "not decoupled"),
        ({"trainer.loss.kind": "no_loss"}, "trainer.loss.kind", "module:function"),
        ({"trainer.loss.kind": "my loss:f"}, "trainer.loss.kind", "module:function"),
        ({"trainer.loss.kind": "dppo"}, "trainer.loss.proximal", "set proximal: behaviour with weight.mode: off"),
        (
            {"trainer.loss.kind": "gspo", "trainer.loss.eps_low": 0.1},
            "trainer.loss.eps_low",
            "trainer.loss.options.eps_low",
        ),
        (
            {"trainer.loss.kind": "cispo", "trainer.loss.dual_clip": 3},
            "trainer.loss.dual_clip",
            "which is only used by decoupled_ppo",
        ),
        (
            {"trainer.loss.kind": "cispo", "trainer.loss.options": {"max_ratio": -1}},
            "trainer.loss.options.max_ratio",
            "greater than 0",
        ),
        ({"trainer.loss.options": {"bound": 1}}, "trainer.loss.options.bound", "there are none"),
        ({"trainer.loss.options": {"eps_low": 0.1}}, "trainer.loss.options.eps_low", "set trainer.loss.eps_low"),
        (
            {"trainer.loss.kl_coef": 0.1, "trainer.loss.kl_estimator": "k1"},
            "trainer.loss.kl_estimator",
            "whose mean is 0",
        ),
        ({"trainer.loss.kl_in": "reward"}, "trainer.loss.kl_in", "has no effect with kl_coef: 0"),
        ({"trainer.loss.corrections": [{"kind": "no_such"}]}, "trainer.loss.corrections.0.kind", "geometric_mask"),
        ({"trainer.loss.corrections": [{"kind": "kpop"}]}, "trainer.loss.corrections.0.options.max_kl", "set it"),
        (
            {"trainer.loss.corrections": [{"kind": "sequence_weight"}]},
            "trainer.loss.weight.mode",
            "set weight.mode: off, and keep only one of them",
        ),
        ({"trainer.advantage.kind": "no_such"}, "trainer.advantage.kind", "grpo, grpo_no_std"),
        ({"trainer.advantage.kind": "a b:c"}, "trainer.advantage.kind", "module:function"),
        ({"trainer.advantage.options": {"k": 1}}, "trainer.advantage.options.k", "there are none"),
        (
            {"trainer.advantage.kind": "rloo", "trainer.advantage.std_eps": 0.1},
            "trainer.advantage.std_eps",
            "no effect with kind: rloo",
        ),
        ({"trainer.loss.proximal": "behaviour"}, "trainer.loss.weight.mode", "weight.mode: off"),
        (
            {"trainer.loss.weight.mode": "mask", "trainer.loss.weight.low": 6.0},
            "trainer.loss.weight.low",
            "keeps no tokens",
        ),
        ({"trainer.loss.weight.mode": "mask", "trainer.loss.weight.max": 0.5}, "trainer.loss.weight.low", "on-policy"),
        ({"trainer.mini_batches": 33}, "trainer.mini_batches", "at most 32"),
        ({"model.path": "x"}, "model", "are mutually exclusive"),
        ({"model.init": None}, "model", "neither"),
        ({"model.init": {"hidden_size": 3}}, "model.init", "model_type"),
        ({"model.tokenizer": "from_model"}, "model.tokenizer", "has no tokenizer"),
        ({"model.tokenizer": "characters:poem"}, "model.tokenizer", "characters:running_sum"),
        ({"trainer.attention": "flash_attn"}, "trainer.attention", "requires CUDA"),
        ({"sampling.max_new_tokens": 2048}, "sampling.max_new_tokens", "at most 2047"),
        ({"eval.max_new_tokens": 9999}, "eval.max_new_tokens", "no room"),
        ({"trainer.micro_batch_tokens": 2000}, "trainer.micro_batch_tokens", "at least 2048"),
        ({"rollout.engine.max_context": 5000}, "rollout.engine.max_context", "max_position_embeddings (4096)"),
        (
            {"warm_start.data": {"generator": "running_sum"}, "warm_start.sft": {"micro_batch_tokens": 5}},
            "warm_start.sft.micro_batch_tokens",
            "at least 2048",
        ),
        ({"data.train": {}}, "data.train", "no source"),
        ({"data.train": {"path": "x", "dataset": "y"}}, "data.train", "mutually exclusive"),
        ({"data.train": {"path": "x", "split": "train"}}, "data.train.split", "remove this key"),
        ({"data.train": {"path": "x", "columns": {"id": "y"}}}, "data.train.columns.id", "own names"),
        (
            {"data.train": {"path": "x", "columns": {"prompt": None}}},
            "data.train.columns.prompt",
            "must be the name of a column",
        ),
        ({"data.train": {"generator": "runing_sum"}}, "data.train.generator", "module:function"),
        ({"data.mix": [{"generator": "running_sum"}], "data.epochs": 2}, "data.epochs", "data.mix adds data sets"),
        ({"data.mix": [{"generator": "runing_sum"}]}, "data.mix.0.generator", "module:function"),
        ({"data.curriculum": {}, "data.epochs": 1}, "data.curriculum", "no row is used twice"),
        ({"data.eval": None, "eval.every_steps": 5}, "eval.every_steps", "data.eval is not set"),
        ({"reward.scorers": [{"kind": "maths"}]}, "reward.scorers.0.kind", "did you mean math"),
        ({"reward.scorers": [{"kind": "math", "weight": 0}]}, "reward.scorers", "weight 0"),
        (
            {"reward.scorers": [{"kind": "math", "held_out": True}]},
            "reward.scorers.0.held_out",
            "cannot be part of the reward",
        ),
        (
            {"reward.scorers": [{"kind": "math"}, {"kind": "mine:score", "weight": 0, "held_out": True, "gate": {}}]},
            "reward.scorers.1.held_out",
            "cannot have a gate",
        ),
        ({"reward.on_failure": float("nan")}, "reward.on_failure", "finite"),
        ({"reward.addresses": ["gpu7:7000"]}, "reward.addresses.0", "tcp://host:port"),
        ({"reward.addresses": ["tcp://a:1", "tcp://a:1"]}, "reward.addresses.1", "once"),
        ({"reward.addresses": ["tcp://a:1"], "reward.num_services": 2}, "reward.num_services", "remove one of the two"),
        ({"reward.ask_for": "math"}, "reward.ask_for", "remove this key"),
        ({"trainer.device": "gpu"}, "trainer.device", "cuda:N"),
        ({"trainer.threads": 0}, "trainer.threads", "auto"),
        ({"rollout.workflow": "two turns"}, "rollout.workflow", "module:Class"),
        ({"reward.scorers": []}, "reward.scorers", "returns its own verdicts"),
        ({"rollout.workflow_options": {"depth": 2}}, "rollout.workflow_options", "has no options"),
        ({"reward.environment": {"kind": "guess_number"}}, "rollout.workflow", "does not use an environment"),
        ({"rollout.workflow": "environment", "reward.scorers": []}, "reward.environment", "kind: module:Class"),
        ({**GUESSING, "reward.environment": {"kind": "gess_number"}}, "reward.environment.kind", "did you mean guess"),
        ({**GUESSING, "reward.scorers": [{"kind": "math"}]}, "reward.scorers", "does not use scorers"),
        (
            {**GUESSING, "rollout.score_timeout_s": 20.0},
            "reward.environment.step_timeout_s",
            "takes up to 20 s including retries",
        ),
        ({"rollout.workflow": "tools"}, "reward.environment", "tools: [module:FUNCTION]"),
        ({**CALLING, "reward.scorers": []}, "reward.scorers", "the workflow `tools` gets verdicts from scorers"),
        ({**CALLING, "rollout.prompt_template": "Q: {prompt}"}, "rollout.prompt_template", "in the chat template"),
        (
            {**CALLING, "reward.environment": {"kind": "tools", "options": {"call_timeout_s": 10}}},
            "reward.environment.options.call_timeout_s",
            "call_timeout_s (10 s) must be less than step_timeout_s",
        ),
        ({"rollout.workflow": "agent"}, "rollout.workflow_options", "requires the command that starts the agent"),
        ({**AGENT, "reward.scorers": []}, "reward.scorers", "gets rewards from scorers"),
        ({**AGENT, "rollout.prompt_template": "Q: {prompt}"}, "rollout.prompt_template", "with the chat template"),
        (
            {**CALLING, "reward.environment": {"kind": "tools", "step_timeout_s": 5.0}},
            "reward.environment.options.call_timeout_s",
            "call_timeout_s (5 s) must be less than step_timeout_s",
        ),
        (
            {**CALLING, "reward.environment": {"kind": "tools", "options": {"max_calls": 8}}},
            "reward.environment.options.max_result_chars",
            "may take 114 kB, but an observation is limited to 64 kB",
        ),
        ({"rollout.prompt_template": "solve this"}, "rollout.prompt_template", "{prompt}"),
        ({"trainer.weights.shared_dir": "/nfs"}, "trainer.weights.shared_dir", "has no effect with kind shm"),
        ({"trainer.weights.swap": "rolling", "rollout.interruption": "drain"}, "trainer.weights.swap", "drain"),
        ({"launch.silence_s": 1.0}, "launch.silence_s", "at least 2"),
        ({"launch.controller_silence_s": 1.0}, "launch.controller_silence_s", "at least 2"),
        ({"name": "../x"}, "name", "folder"),
        ({"sampling.stop_token_ids": [2**40]}, "sampling.stop_token_ids.0", "from 0 to 2147483647"),
        ({"name": "two\nlines"}, "name", "folder"),
        ({"name": "n" * 300}, "name", "folder"),
        ({"name": "-rf"}, "name", "folder"),
    ],
)
def test_contradiction_is_refused_with_its_key_and_a_remedy(changes: dict[str, Any], key: str, words: str) -> None:
    config, problems = build(config_of(changes))
    assert config is None
    assert [problem.keys[0] for problem in problems] == [key]
    assert words in str(problems[0])
    assert problems[0].remedy or "finite" in words or "weight 0" in words


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"kind": "shm"}, "shared memory"),
        ({"kind": "disk"}, "a folder that all hosts share"),
        ({"kind": "disk", "shared_dir": "/nfs/weights"}, None),
        ({"kind": "stream"}, None),
    ],
)
def test_workers_on_other_hosts_need_a_way_for_weights(weights: dict[str, Any], words: str | None) -> None:
    config = make(trainer__weights=weights)
    assert cross_check(config) == []
    spread = config.model_copy(update={"launch": config.launch.model_copy(update={"kind": "ray"})})
    found = [str(problem) for problem in cross_check(spread) if "weights" in str(problem)]
    assert len(found) == (words is not None)
    assert words is None or words in found[0]


def test_ordinary_ppo_and_unbounded_are_allowed_when_said_wholly() -> None:
    assert cross_check(make(trainer__loss={"proximal": "behaviour", "weight": {"mode": "off"}})) == []
    assert cross_check(make(staleness={"max_staleness": "unbounded", "on_stale": "keep"})) == []
    assert cross_check(make(group_size=1, trainer__advantage={"kind": "global_norm"})) == []


def test_loopback_is_recognised() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.1.2.3", "localhost", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "10.0.0.1", "example.org", "1270.0.0.1")))


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_any_number_of_samples_goes_with_any_number_of_ranks(ranks: int) -> None:
    trainer = {"backend": "fsdp", "ranks": ranks, "mini_batches": 2}
    config = make(groups_per_step=7, group_size=7, trainer=trainer)
    assert cross_check(config) == []
    assert "have no samples" not in "\n".join(advise(config))
    few = make(groups_per_step=2, group_size=2, trainer={**trainer, "ranks": 3})
    assert cross_check(few) == []
    assert "4 samples are fewer than 2 mini-batches x 3 ranks" in "\n".join(advise(few))


class TestDerived:
    def test_numbers_of_a_config(self) -> None:
        config = make(groups_per_step=4, group_size=2, num_steps=5, staleness__max_staleness=2)
        shown = {number.name: number.value for number in derive(config, num_rows=10)}
        assert shown["samples per step"] == "8"
        assert shown["groups in flight"] == "<= 12"
        assert shown["samples in flight"] == "<= 24"
        assert shown["epochs needed"] == "2.00"

    def test_tokens_for_a_replay_are_counted_at_full_length_and_so_is_whether_they_are_kept(self) -> None:
        engine = {"max_context": 1000}
        sizes = {"groups_per_step": 10, "group_size": 10, "num_steps": 1000, "sampling__max_new_tokens": 500}
        name = "tokens for a replay of all steps"
        (found,) = [one for one in derive(make(**sizes, rollout__engine=engine)) if one.name == name]
        assert found.value == "<= 1.51 GB", "1000 x 100 x (1000 x 13 + 500 x 4 + 100) bytes"
        assert found.formula.endswith("ledger.keep_mb keeps 2,048 MB, null keeps all tokens")
        (found,) = [one for one in derive(make(**sizes, ledger__keep_mb=None)) if one.name == name]
        assert found.formula.endswith("all tokens are kept")

    def test_unbounded_is_called_so(self) -> None:
        config = make(staleness={"max_staleness": "unbounded", "on_stale": "keep"})
        assert {n.name: n.value for n in derive(config)}["samples in flight"] == "unbounded"

    def test_kv_cache_counts_grouped_heads_and_dtype(self) -> None:
        config = make(rollout__engine={"num_slots": 10, "max_context": 100})
        model = {**QWEN, "num_key_value_heads": 2}
        assert kv_cache_bytes(model, config) == 2 * 2 * 2 * 16 * 4 * 10 * 100
        half = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "bfloat16"})})
        assert kv_cache_bytes(model, half) == 2 * 2 * 2 * 16 * 2 * 10 * 100
        assert kv_cache_bytes({}, config) is None
        assert size_text(1234) == "1.23 kB"

    def test_waste_is_remarked_upon(self) -> None:
        text = "\n".join(
            advise(make(groups_per_step=3, group_size=2, staleness__max_staleness=0, trainer__mini_batches=2))
        )
        assert "stay empty" in text
        assert "unequal" in text
        assert "ends after about 3 steps" in "\n".join(advise(make(data__epochs=1), num_rows=100))
        assert "no accuracy" in "\n".join(advise(make(data__eval=None)))


def write_model(folder: Path, **config: Any) -> Path:
    """A model folder that passes: config, one tensor, tokenizer."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**QWEN, **config}))
    (folder / "tokenizer.json").write_text("{}")
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    return folder


class TestModelFolder:
    def faults(self, path: Path | str, tokenizer: str = "from_model") -> list[str]:
        return [str(error) for error in model_folder.problems_of(str(path), tokenizer)[0]]

    def test_a_whole_one_passes(self, tmp_path: Path) -> None:
        assert self.faults(write_model(tmp_path / "m")) == []

    def test_a_missing_one_names_the_nearest(self, tmp_path: Path) -> None:
        write_model(tmp_path / "qwen-small")
        assert "qwen-small" in self.faults(tmp_path / "qwen-smal")[0]

    def test_an_empty_one_and_a_file_are_refused(self, tmp_path: Path) -> None:
        assert "empty" in self.faults(tmp_path)[0]
        (tmp_path / "f").write_text("x")
        assert "is a file" in self.faults(tmp_path / "f")[0]

    def test_everything_that_is_missing_is_said_at_once(self, tmp_path: Path) -> None:
        (tmp_path / "readme.md").write_text("x")
        text = "\n".join(self.faults(tmp_path))
        assert "config.json" in text
        assert "no weights" in text
        assert "no tokenizer" in text

    @pytest.mark.parametrize("content", [b"", b"abc", bytes(100), struct.pack("<Q", 10) + b"not json.." + bytes(9)])
    def test_corrupt_weights_are_refused(self, tmp_path: Path, content: bytes) -> None:
        folder = write_model(tmp_path / "m")
        (folder / "model.safetensors").write_bytes(content)
        assert "not a complete safetensors file" in self.faults(folder)[0]

    def test_weights_cut_short_are_refused(self, tmp_path: Path) -> None:
        file = write_model(tmp_path / "m") / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-3])
        assert "8 bytes, but the file has 5" in self.faults(file.parent)[0]

    def test_an_index_that_names_a_missing_file_is_refused(self, tmp_path: Path) -> None:
        folder = write_model(tmp_path / "m")
        (folder / "model.safetensors.index.json").write_text('{"weight_map": {"w": "model-1-of-2.safetensors"}}')
        assert "model-1-of-2.safetensors is missing" in self.faults(folder)[0]

    @pytest.mark.parametrize("content", ["", "[]", "{}", "{"])
    def test_a_config_that_is_none_is_refused(self, tmp_path: Path, content: str) -> None:
        folder = write_model(tmp_path / "m")
        (folder / "config.json").write_text(content)
        assert "config.json" in self.faults(folder)[0]

    def test_a_hub_name_may_be_elsewhere(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.delenv("HF_HUB_CACHE", raising=False)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        assert model_folder.problems_of("Qwen/Qwen3-8B", "from_model") == ([], None, False)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        assert "HF_HUB_OFFLINE" in self.faults("Qwen/Qwen3-8B")[0]

    def test_a_hub_name_is_found_in_the_cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
        snapshot = write_model(tmp_path / "hub" / "models--Qwen--Tiny" / "snapshots" / "abc")
        assert model_folder.find_model("Qwen/Tiny") == snapshot

    def test_lora_targets_that_the_model_does_not_have_are_found_in_its_files(self, tmp_path: Path) -> None:
        folder = write_model(tmp_path / "m")
        table = {"model.layers.0.mlp.up_proj.weight": [2, 1], "model.embed_tokens.weight": [2, 1], "norm.weight": [2]}
        entries = {
            name: {"dtype": "F32", "shape": shape, "data_offsets": [8 * place, 8 * place + 8]}
            for place, (name, shape) in enumerate(table.items())
        }
        header = json.dumps(entries).encode()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(24))

        def words(*targets: str) -> list[str]:
            config = make(model={"path": str(folder)}, trainer__lora={"targets": targets})
            problems = preflight.look(config, "validate").problems
            return [str(problem) for problem in problems if "trainer.lora.targets" in problem.keys]

        assert words("all-linear", "up_proj", "layers.0.mlp.up_proj") == []
        (found,) = words("up_proj", "upproj")
        assert "the model has no linear module upproj -> did you mean up_proj?" in found
        assert "its linear modules are up_proj" in words("norm")[0]
        sft = {"data": {"generator": "running_sum"}, "sft": {"lora": {"targets": ["upproj"]}}}
        problems = preflight.look(make(model={"path": str(folder)}, warm_start=sft), "validate").problems
        assert [problem.keys[0] for problem in problems] == ["warm_start.sft.lora.targets"]

    @pytest.mark.parametrize(
        ("init", "targets", "words"),
        [
            ({}, ["all-linear", "q_proj", "layers.1.mlp.up_proj"], ""),
            ({}, ["layers.2.mlp.up_proj"], "the model has no linear module layers.2.mlp.up_proj"),
            ({}, ["upproj"], "the model has no linear module upproj -> did you mean up_proj?"),
            ({"model_type": "gpt_neox"}, ["upproj"], ""),
        ],
    )
    def test_lora_targets_of_a_model_that_is_made_are_those_of_its_type(
        self, init: dict[str, Any], targets: list[str], words: str
    ) -> None:
        sizes = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2}
        config = make(model={"init": {**sizes, **init}, "tokenizer": "bytes"}, trainer__lora={"targets": targets})
        found = [one for one in preflight.look(config, "validate").problems if "trainer.lora.targets" in one.keys]
        assert [one.keys for one in found] == ([("trainer.lora.targets", "model.init")] if words else [])
        assert words in "".join(map(str, found))

    def test_a_folder_with_an_adapter_alone_is_no_model(self, tmp_path: Path) -> None:
        folder = write_model(tmp_path / "m")
        (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text("{}")
        (problem,) = preflight.look(make(model={"path": str(folder)}), "validate").problems
        assert "the folder contains only a LoRA adapter -> convert the checkpoint to a complete model" in str(problem)

    def test_context_beyond_the_models_positions_is_refused(self, tmp_path: Path) -> None:
        folder = write_model(tmp_path / "m", max_position_embeddings=100)
        found = preflight.look(make(model={"path": str(folder)}), "validate")
        assert [problem.keys[0] for problem in found.problems] == ["rollout.engine.max_context"]

    def test_context_beyond_the_length_of_the_models_rotation_is_refused(self, tmp_path: Path) -> None:
        rope = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
        keys = {"max_position_embeddings": 131072, "original_max_position_embeddings": 100, "rope_scaling": rope}
        (problem,) = preflight.look(make(model={"path": str(write_model(tmp_path / "m", **keys))}), "validate").problems
        assert problem.keys == ("rollout.engine.max_context",)
        assert "more than 100 positions, beyond which the model's longrope frequencies depend" in str(problem)
        _, found = build(config_of({"model.init": {**QWEN, **keys}}))
        assert [problem.keys[0] for problem in found] == ["rollout.engine.max_context"]

    def test_a_tokenizer_folder_is_looked_at(self, tmp_path: Path) -> None:
        found = preflight.look(make(model__tokenizer=str(tmp_path)), "validate")
        assert "no tokenizer" in str(found.problems[0])
        with pytest.raises(UserError, match="no such tokenizer"):
            model_folder.check_tokenizer(tmp_path / "none")


class TestMachine:
    def test_a_whole_config_has_nothing_missing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        found = preflight.look(make(), "train")
        assert (found.problems, found.absent) == ([], [])
        assert found.eval is not None
        assert len(found.eval) == 5
        assert list(tmp_path.iterdir()) == []

    def test_runs_dir_that_cannot_be_written_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        found = preflight.look(make(runs_dir=str(tmp_path / "file" / "runs")), "train")
        assert "is a file" in str(found.problems[0])
        found = preflight.look(make(runs_dir="/proc/areal_like/runs"), "train")
        assert "runs_dir" in str(found.problems[0])

    def test_a_port_in_use_stops_a_start_and_is_a_remark_to_validate(self) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            found = preflight.look(make(launch__port=taken.getsockname()[1]), "validate")
        assert found.problems == []
        assert [problem.keys[0] for problem in found.absent] == ["launch.port"]

    @pytest.mark.parametrize("host", ["a" * 70, "a..b"])
    def test_what_cannot_be_a_host_is_named(self, host: str) -> None:
        found = preflight.look(make(launch__host=host), "validate")
        assert [problem.keys[0] for problem in found.absent] == ["launch.host"]

    def test_more_workers_than_memory_can_hold_are_refused_before_they_start(self) -> None:
        found = preflight.look(make(rollout__num_workers=60_000), "train")
        assert [problem.keys[0] for problem in found.absent] == ["rollout.num_workers"]

    def test_a_host_that_is_not_this_machines_is_named(self) -> None:
        found = preflight.look(make(launch__host="192.0.2.77"), "validate")
        assert [problem.keys[0] for problem in found.absent] == ["launch.host"]

    def test_a_named_kernel_that_is_not_installed_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(packages, "find_spec", lambda name: None)
        config = make(trainer__attention="flash_attn", trainer__device="cuda")
        assert "flash-attn" in str(preflight.look(config, "validate").problems[0])

    def test_cuda_without_a_gpu_is_absent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(machine, "count_gpus", lambda: 0)
        assert "no NVIDIA GPU" in str(preflight.look(make(trainer__device="cuda"), "validate").absent[-1])

    def test_more_gpus_than_there_are_is_absent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(machine, "count_gpus", lambda: 2)
        config = make(trainer__device="cuda:1", rollout={"num_workers": 2, "engine": {"device": "cuda"}})
        assert "; trainer: 1 rank x 1 GPU), but this machine has 2" in str(preflight.look(config, "train").absent[-1])
        config = make(trainer__device="cuda:5", rollout={"engine": {"device": "cuda:0"}})
        assert "cuda:5 is configured, but this machine has 2 GPUs" in str(preflight.look(config, "train").absent[-1])

    def test_a_scorers_module_that_is_not_there_is_named(self) -> None:
        found = preflight.look(make(reward__scorers=[{"kind": "no_such_module_here:score"}]), "train")
        assert [problem.keys[0] for problem in found.problems] == ["reward.scorers.0.kind"]

    def test_each_command_needs_its_own_part(self) -> None:
        config = make(data={"train": {"path": "/nowhere/x.jsonl"}})
        assert [p.keys[0] for p in preflight.look(config, "train").problems] == ["data.train"]
        assert [p.keys[0] for p in preflight.look(config, "eval").problems] == ["data.eval"]
        assert [p.keys[0] for p in preflight.look(config, "sft").problems] == ["warm_start"]


@pytest.mark.parametrize("name", shipped_configs())
def test_a_resolved_config_is_valid_again(name: str, tmp_path: Path) -> None:
    """What `resume` reads: every key named, each at its value."""
    config = load_config(name).config
    resolved = tmp_path / "config.yaml"
    resolved.write_text(dump_yaml(config))
    assert load_config(str(resolved)).config == config
