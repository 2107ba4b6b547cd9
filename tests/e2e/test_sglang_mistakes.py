"""Mistakes about SGLang, as a user sees them, and the command line that options become.

What a server refuses at its start: from the real one's recorded words, in tests/rollout/sglang/test_sglang_start.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout.config import EngineSettings, SGLangSettings
from rollout.engine.sglang.arguments import Launch
from rollout.engine.sglang.environment import ENVIRONMENT

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("rollout.engine.sglang.arguments={enable-metric: true}", "SGLang 0.5.23 has no argument `enable-metric`"),
        ("rollout.engine.python=/nowhere/python", "there is no Python interpreter at /nowhere/python"),
    ],
)
def test_mistakes_are_one_sentence(areal, quickstart, short, sglang_python, given, said):
    run = areal(
        "train", quickstart, *short, "rollout.engine.kind=sglang", f"rollout.engine.python={sglang_python}", given
    )
    assert run.wait() == 2, run.output
    assert said in " ".join(run.output.split())
    assert "Traceback" not in run.output


def test_every_flag_that_options_become_is_one_this_version_takes(sglang_python):
    """Those that only a GPU can run are at least not refused by its command line."""
    table = ENVIRONMENT.argument_table(Path(sglang_python), is_cpu=True)
    options = SGLangSettings(
        quantization="fp8", kv_cache_dtype="fp8_e4m3", deterministic=True, release_idle_s=1.0, release="all",
        routed_experts=True, memory_fraction=0.5,
    )  # fmt: skip
    for device in ("cuda:1", "cpu"):
        settings = EngineSettings(kind="sglang", device=device, sglang=options)
        launch = Launch(Path(sglang_python), settings, "bfloat16", 100, 1, "keep_kv", ())
        words = launch.command(Path("model"), 3, port=1, nccl_port=2, seed=1, key_file=Path("key"))[3:]
        for name, following in zip(words, [*words[1:], "--"], strict=True):
            if name.startswith("--"):
                argument = table[name.removeprefix("--")]
                assert argument.takes_value == (not following.startswith("--")), name
                assert not argument.choices or following in argument.choices, name
