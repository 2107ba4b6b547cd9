"""A real encrypted run, killed and resumed: its prompts, answers, settings and weights are in none of its files.

The file formats are tested in tests/areal_like/encryption, the ledger in tests/controller/ledger.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cryptography", reason="the extra `encryption` is not installed")

from safetensors.numpy import load_file

from areal_like.encryption.master_key import KEY_FILE_VARIABLE
from controller.cli.main import main

pytestmark = pytest.mark.e2e

SETTING = "Zebra-quartz-5519"
PROMPT = "3+1+4+1+5+9+2+6+5="
ROWS = """
PROMPT = {prompt!r}


def rows(seed, split, *, limit, options):
    assert options["label"]
    for _ in range(20):
        yield {{"prompt": PROMPT, "answer": "36"}}
"""
SCORER = """
import logging

calls = 0


def score(row, response, **info):
    global calls
    calls += 1
    logging.getLogger("mine").warning("scored %s%s", row["prompt"], response)
    if calls % 4 == 1:
        raise RuntimeError("no score for " + row["prompt"] + response)
    return float(len(response) % 3)


score.is_deterministic = False
"""
SETTINGS = [
    "warm_start=null", "num_steps=5", "groups_per_step=4", "group_size=2", "sampling.max_new_tokens=12",
    "eval.every_steps=0", "trainer.checkpoint.every_steps=1", "data.train.split=null", "data.train.limit=null",
    "data.train.generator=canary_rows:rows", f'data.train.options={{"label": "{SETTING}"}}', f"notes={SETTING}",
    "data.eval.generator=canary_rows:rows", f'data.eval.options={{"label": "{SETTING}"}}', "data.eval.limit=null",
    "reward.num_workers=1", "reward.num_spares=0", "reward.retries=0", "reward.on_failure=0.0", "reward.cache_mb=0",
    'reward.scorers=[{"kind": "canary_scorer:score"}]', "metrics.report=true",
]  # fmt: skip


def write_key(path: Path) -> str:
    key = secrets.token_hex(32)
    path.touch(mode=0o600)
    path.write_text(key)
    return key


def found_in(folder: Path, canaries: dict[str, bytes]) -> dict[str, list[str]]:
    """Names of the canaries in each file that has any."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and (names := [name for name, text in canaries.items() if text in path.read_bytes()]):
            found[str(path.relative_to(folder))] = names
    return found


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The sentence with which a command refuses."""
    assert main(list(words)) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert len([line for line in said.splitlines() if not line.startswith("note: ")]) == 1
    return said


@pytest.mark.thorough
def test_no_content_of_an_encrypted_run_is_in_its_files_and_with_the_key_every_command_reads_it(
    areal, quickstart, tmp_path, monkeypatch, capsys
):
    key = write_key(tmp_path / "key")
    (tmp_path / "canary_rows.py").write_text(ROWS.format(prompt=PROMPT))
    (tmp_path / "canary_scorer.py").write_text(SCORER)
    run = areal("train", quickstart, *SETTINGS, f"encryption.key_file={tmp_path / 'key'}")
    run.wait_for_step(2)
    os.kill(run.process.pid, signal.SIGKILL)
    run.wait()
    assert run.survivors(run.family(), 60.0) == []
    texts = {"prompt": PROMPT.encode(), "setting": SETTING.encode(), "key": key.encode(), "raw key": bytes.fromhex(key)}
    assert found_in(run.folder, texts) == {}, "after a kill"

    (tmp_path / "key").rename(tmp_path / "moved")
    without = areal("resume", str(run.folder))
    assert without.wait() == 2
    assert f"the key cannot be read from the file {tmp_path / 'key'}" in without.output
    assert KEY_FILE_VARIABLE in without.output
    for words in (["samples"], ["verify"], ["report", "--out", str(tmp_path / "no")], ["lineage"], ["replay"]):
        assert "the key cannot be read" in refused(capsys, words[0], str(run.folder), *words[1:])
    main(["status", str(run.folder)])
    assert "step" in capsys.readouterr().out

    monkeypatch.setenv(KEY_FILE_VARIABLE, str(tmp_path / "moved"))
    resumed = areal("resume", str(run.folder))
    assert resumed.wait() == 0, resumed.output
    assert "no report was written, because the run is encrypted" in resumed.output
    folder = run.folder

    assert main(["samples", str(folder), "--format", "jsonl", "--limit", "all"]) == 0
    samples = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(one["prompt"].endswith(PROMPT) for one in samples)
    assert any(f"no score for {PROMPT}" in str(one) for one in samples), "reasons are decrypted"
    answers = {one["answer"].encode() for one in samples if len(one["answer"]) >= 6}
    assert answers, "the model answers"
    texts |= {f"answer {number}": answer for number, answer in enumerate(answers)}

    assert main(["decrypt", str(folder / "final"), str(tmp_path / "plain")]) == 0
    weights = load_file(tmp_path / "plain" / "model.safetensors")
    projections = [name for name in weights if "proj" in name]  # others have zeros and ones
    texts |= {name: weights[name].tobytes()[:64] for name in projections[:3]}
    assert found_in(tmp_path / "plain", texts), "weights would be found"
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(folder / "final" / "tokenizer.json")).encode(PROMPT, add_special_tokens=False).ids
    texts["tokens of the prompt"] = np.asarray(ids, np.int32).tobytes()
    assert {path.name for path in folder.iterdir()} >= {"config.yaml", "ledger.sqlite", "metrics.jsonl", "segments",
                                                       "checkpoints", "final", "logs", "processes"}  # fmt: skip
    assert found_in(folder, texts) == {}

    assert main(["verify", str(folder)]) == 0, capsys.readouterr().out
    assert main(["logs", str(folder), "-n", "all"]) == 0
    assert f"scored {PROMPT}" in capsys.readouterr().out, "logs are decrypted"
    assert main(["report", str(folder), "--out", str(tmp_path / "report")]) == 0
    assert PROMPT in (tmp_path / "report" / "report.html").read_text()
    assert "--out FOLDER" in refused(capsys, "report", str(folder))
    assert main(["export", str(folder), str(tmp_path / "export")]) == 0
    assert found_in(tmp_path / "export", texts) == {}
    assert main(["export", str(folder), str(tmp_path / "clear"), "--decrypt"]) == 0
    exported = load_file(tmp_path / "clear" / "model.safetensors")
    assert all(np.array_equal(exported[name], weight) for name, weight in weights.items())

    file = folder / "final" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert "was changed, or the file was truncated" in refused(
        capsys, "decrypt", str(folder / "final"), str(tmp_path / "again")
    )
    assert not (tmp_path / "again").exists()
    assert main(["verify", str(folder)]) == 1
    assert "model.safetensors differs from its digest" in capsys.readouterr().out
    write_key(tmp_path / "moved")
    assert "is not the key that the data was encrypted with" in refused(capsys, "samples", str(folder))
