"""An exported folder in the oldest transformers that pyproject.toml names: the same tokens and the same logits.

AREAL_LIKE_OLD_TRANSFORMERS names a folder with that version, which is put before the installed packages:

    pip install --no-deps --target FOLDER transformers==5.17.0 "huggingface-hub>=1.5,<2" "httpx<1" "httpcore<2"
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trainer.checkpoints.convert import export_checkpoint, import_folder
from trainer.model.tokenizers import build_tokenizer

pytestmark = pytest.mark.processes

PYPROJECT = Path(__file__).resolve().parents[3] / "pyproject.toml"
LOAD = """
import json, sys, torch, transformers
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokens = tokenizer("2+2=4").input_ids
with torch.no_grad():
    logits = model(torch.tensor([tokens])).logits[0, -1]
print(json.dumps([transformers.__version__, tokens, logits.tolist()]))
"""


def loaded(folder: Path, first: str = "") -> list:
    """Version of transformers, tokens of a text and logits of its last one, in a new interpreter."""
    path = os.pathsep.join(filter(None, [first, os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(folder)], env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_exported_folder_loads_in_the_oldest_transformers_named(tmp_path: Path) -> None:
    old = os.environ.get("AREAL_LIKE_OLD_TRANSFORMERS")
    if not old:
        pytest.skip("AREAL_LIKE_OLD_TRANSFORMERS names no folder with the oldest transformers")
    from transformers import Qwen3Config, Qwen3ForCausalLM

    (oldest,) = re.findall(r'"transformers>=([\d.]+)', PYPROJECT.read_text())
    tokenizer = build_tokenizer("bytes", None)
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, intermediate_size=64, rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "start")
    tokenizer.save_pretrained(tmp_path / "start")
    import_folder(tmp_path / "start", tmp_path / "checkpoint")
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "out")
    _, tokens, logits = loaded(tmp_path / "out")
    version, old_tokens, old_logits = loaded(tmp_path / "out", old)
    assert version.startswith(oldest)
    assert old_tokens == tokens
    torch.testing.assert_close(torch.tensor(old_logits), torch.tensor(logits))
