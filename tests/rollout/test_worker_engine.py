"""The rollout worker with the embedded engine, in process and as the process the launcher starts."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from made_keys import keys_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from areal_like.config import ModelSettings, ProcessSpec, SamplingSettings, StalenessSettings
from areal_like.trajectory import Segment
from areal_like.weights.payload_layout import TensorBytes
from areal_like.weights.weight_store import WeightStore
from areal_like.wire import messages as m
from rollout.config import EngineSettings
from rollout.engine.embedded import EmbeddedEngine

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
EOS, VOCAB = 2, 128
CONFIG = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 96, "tie_word_embeddings": False,
    "eos_token_id": EOS, "bos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


def make_model(seed):
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**CONFIG)).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(10.0)  # versions differ by far more than the tolerance
        model.lm_head.weight[EOS] = 0.0
    return model


def make_folder(folder):
    """A model folder with a tokenizer of one token per printable character."""
    make_model(0).save_pretrained(folder)
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": EOS, **{chr(code): code for code in range(32, 127)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>").save_pretrained(folder)
    return folder


def publish(store, version, model):
    tensors = {
        name: TensorBytes("float32", tuple(tensor.shape), memoryview(tensor.contiguous().numpy()).cast("B"))
        for name, tensor in model.state_dict().items()
    }
    return store.publish(version, "l0", tensors)


def logprobs_of(model, tokens_T):
    with torch.no_grad():
        logits = model(torch.tensor(tokens_T, dtype=torch.long)[None]).logits[0, :-1]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens_T[1:], dtype=torch.long)[:, None])[:, 0]


def test_answer_cut_and_continued_under_newer_versions_has_the_log_probs_of_each(rig, fake, tmp_path):
    folder = make_folder(tmp_path / "model")
    store = WeightStore(tmp_path / "weights", "disk", keep=4)
    policies = [make_model(seed) for seed in range(3)]
    settings = EngineSettings(device="cpu", num_slots=4, max_context=96)

    async def scenario(r):
        await r.ready(version=None)
        answers = {index: Segment.empty() for index in range(3)}
        lease_id = 0
        for version, policy in enumerate(policies):
            path = str(publish(store, version, policy))
            r.send(m.AnnounceVersion(version=version, lineage="l0", manifest_path=path))
            tasks = []
            for index, prefix in answers.items():
                lease_id += 1
                is_last = version == 2
                tasks.append(
                    fake.task(
                        lease_id, index=index, prefix=prefix, min_version=version, segment_tokens=0 if is_last else 6,
                        sampling=m.Sampling(max_new_tokens=30),
                    )
                )  # fmt: skip
            r.lease(*tasks)
            await r.until(lambda n=lease_id: len(r.got(m.SampleReturned) + r.got(m.SampleFinished)) == n, "ends")
            for task in tasks:
                answers[task.sample_index] = task.prefix.joined(r.reports[task.lease_id][1]) if version < 2 else None
        for done in r.got(m.SampleFinished):
            versions = done.trajectory.versions_T[2:]
            assert versions[:14].tolist() == [0] * 6 + [1] * 6 + [2] * 2
            tokens_T = done.trajectory.tokens_T.tolist()
            for version, policy in enumerate(policies):
                wanted = logprobs_of(policy, tokens_T)[1:][torch.tensor(versions == version)]
                found = torch.tensor(done.trajectory.logprobs_T[2:][versions == version])
                torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
        assert len(r.got(m.SampleFinished)) == 3

    def engine():
        return EmbeddedEngine(folder, settings, dtype="float32", num_threads=1)

    rig(scenario, engine=engine)


def make_spec(tmp_path, address, **more):
    given = {"settings": {"engine": {"device": "cpu", "num_slots": 4, "max_context": 96}}, **more}
    return ProcessSpec(
        role="rollout",
        name="rollout-0",
        run_id="run-1",
        run_dir=str(tmp_path),
        hub_address=address,
        parent_pid=os.getpid(),
        seed=1,
        heartbeat_s=0.1,
        silence_s=60.0,
        model=ModelSettings(path=str(tmp_path / "model")),
        sampling=SamplingSettings(),
        staleness=StalenessSettings(),
        groups_per_step=1,
        group_size=2,
        num_steps=1,
        weight_dir=str(tmp_path / "weights"),
        curve_dir=str(keys_of("rollout", "rollout-0")),
        trace={"max_events": 1000},
        **given,
    )


async def spawn(spec, tmp_path):
    spec.save(tmp_path / "spec.json")
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rollout", "--spec", str(tmp_path / "spec.json"), cwd=ROOT, stderr=subprocess.PIPE
    )


@pytest.mark.e2e
def test_process_works_and_ends_normally_on_sigterm(fake, tmp_path):
    make_folder(tmp_path / "model")
    path = str(publish(WeightStore(tmp_path / "weights", "disk", keep=2), 0, make_model(0)))

    async def scenario():
        hub, address = await fake.hub("controller")
        process = await spawn(make_spec(tmp_path, address), tmp_path)
        finished = goodbye = None
        while goodbye is None:
            received = await hub.receive(60.0)
            assert received is not None, "the worker fell silent"
            message = received[1]
            if isinstance(message, m.Hello):
                assert message.capacity == 8
                hub.send("rollout-0", m.AnnounceVersion(version=0, lineage="l0", manifest_path=path))
                hub.send("rollout-0", m.Lease(tasks=(fake.task(1, sampling=m.Sampling(max_new_tokens=20)),)))
            elif isinstance(message, m.SampleFinished):
                finished = message
                hub.send("rollout-0", m.SampleAck(lease_ids=(1,)))
                process.terminate()
            elif isinstance(message, m.Goodbye):
                goodbye = message
        _, stderr = await process.communicate()
        await hub.close()
        assert process.returncode == 0, stderr.decode()
        assert finished.verdict.kind == "invalid"
        assert (tmp_path / "logs" / "rollout-0.trace.jsonl").stat().st_size > 0

    asyncio.run(asyncio.wait_for(scenario(), 300.0))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"settings": {"engine": {"num_slotz": 4}}}, "num_slotz"),
        ({"settings": {"workflow": "no_such_module:It"}}, "no_such_module"),
    ],
)
def test_users_mistake_ends_the_process_with_status_2_and_one_sentence(tmp_path, more, words):
    async def scenario():
        process = await spawn(make_spec(tmp_path, "tcp://127.0.0.1:1", **more), tmp_path)
        _, stderr = await process.communicate()
        text = stderr.decode()
        assert process.returncode == 2, text
        assert "Traceback" not in text
        assert text.splitlines()[-1].startswith("error: ")
        assert words in text.splitlines()[-1]

    asyncio.run(asyncio.wait_for(scenario(), 300.0))
