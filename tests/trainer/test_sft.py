"""Claims about supervised steps: what is trained on, in which order, and that it learns."""

from __future__ import annotations

import itertools
import json
import operator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from call_templates import TEMPLATES, tokenizer_of
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from areal_like.errors import UserError
from trainer.config import SftSettings
from trainer.model.attention import AttentionChoice
from trainer.model.model import make_model
from trainer.model.tokenizers import build_tokenizer
from trainer.sft import Example, ExampleEncoder, _accumulate_gradient, _batches, read_rows, run_sft

SDPA = AttentionChoice("sdpa", "test")
INIT: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return build_tokenizer("characters:running_sum", None)


@pytest.fixture
def model(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    return make_model(INIT, tokenizer, seed=1)


def encoder(tokenizer: PreTrainedTokenizerBase, **changes: Any) -> ExampleEncoder:
    return ExampleEncoder(tokenizer, **{"eos_token_id": 2, "max_tokens": 64, **changes})


def examples(tokenizer: PreTrainedTokenizerBase) -> list[Example]:
    rows = [{"prompt": f"{a}+{b}=", "response": f"#{(a + b) % 10}"} for a in range(4) for b in range(a + 1)]
    return [encoder(tokenizer).encode(row, where="row") for row in rows]


def settings(**changes: Any) -> SftSettings:
    return SftSettings(**{"steps": 5, "batch_size": 4, "log_every": 100, **changes})


def test_loss_falls_on_the_response_and_the_end_only(tokenizer: PreTrainedTokenizerBase) -> None:
    example = encoder(tokenizer).encode({"prompt": "1+2=", "response": "#3"}, where="row")
    assert example.tokens_T.tolist() == [1, 4, 13, 5, 14, 17, 6, 2]
    assert example.loss_mask_T.tolist() == [False] * 5 + [True] * 3


def test_bos_is_neither_doubled_nor_forced(tokenizer: PreTrainedTokenizerBase) -> None:
    row = {"prompt": "<bos>1=", "response": "1"}
    for mode, expected in (("auto", 1), ("always", 1), ("never", 0)):
        example = encoder(tokenizer, add_bos=mode).encode(row, where="row")
        assert example.tokens_T.tolist().count(1) == expected


def test_prompt_template_and_chat_template_shape_the_prompt(tokenizer: PreTrainedTokenizerBase) -> None:
    row = {"prompt": "1", "response": "1"}
    templated = encoder(tokenizer, prompt_template="{prompt}+0=").encode(row, where="row")
    assert tokenizer.decode(templated.tokens_T[1:-2]) == "1+0="
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.content }};{% endfor %}"
    chat = encoder(tokenizer).encode(row, where="row")
    assert tokenizer.decode(chat.tokens_T) == "<bos>1;1<eos>"


@pytest.mark.parametrize("name", ["characters:running_sum", "bytes"])
@pytest.mark.parametrize("add_bos", ["auto", "always", "never"])
@pytest.mark.parametrize("template", [None, "{prompt}0="])
@pytest.mark.parametrize("chat_template", [None, "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"])
def test_supervised_prompt_is_the_rollout_workers_prompt(
    name: str, add_bos: Any, template: str | None, chat_template: str | None
) -> None:
    from rollout.tokens import PromptTokens

    tokenizer = build_tokenizer(name, None)
    tokenizer.chat_template = chat_template
    rows: list[dict[str, Any]] = [{"prompt": "1+2=", "response": "#3"}]
    if chat_template:
        rows += [{"messages": [{"role": role, "content": "1+2="}], "response": "#3"} for role in ("user", "assistant")]
    theirs = PromptTokens(tokenizer, template=template, add_bos=add_bos, max_context=64)
    for row in rows:
        example = encoder(tokenizer, prompt_template=template, add_bos=add_bos).encode(row, where="row")
        assert example.tokens_T[~example.loss_mask_T].tolist() == theirs.prompt(row).tolist()


def trained(tokenizer: PreTrainedTokenizerBase, example: Example) -> list[tuple[bool, str]]:
    """Runs of tokens that are trained on, or not, as text."""
    marked = zip(example.loss_mask_T.tolist(), example.tokens_T.tolist(), strict=True)
    groups = itertools.groupby(marked, key=operator.itemgetter(0))
    return [(is_trained, tokenizer.decode([token for _, token in run])) for is_trained, run in groups]


def test_only_trained_spans_are_learnt_and_the_end_after_the_last(tokenizer: PreTrainedTokenizerBase) -> None:
    row = {"prompt": "1+2=", "spans": [["1+2", True], ["=3;", False], ["#3", True]]}
    assert trained(tokenizer, encoder(tokenizer).encode(row, where="row")) == [
        (False, "<bos>1+2="), (True, "1+2"), (False, "=3;"), (True, "#3<eos>"),
    ]  # fmt: skip
    row["spans"].append(["0", False])  # type: ignore[attr-defined]
    assert trained(tokenizer, encoder(tokenizer).encode(row, where="row"))[-2:] == [(True, "#3"), (False, "0")]


@pytest.mark.parametrize(
    ("spans", "words"),
    [
        ([["1", False]], "no span is marked for training"),
        ([["", True]], "no span is marked for training"),
        ([], "no span is marked for training"),
        ([["1"]], "must be a list of"),
        ([["1", 1]], "must be a list of"),
        ("1", "must be a list of"),
        ([["x", True]], "cannot encode a span"),
    ],
)
def test_spans_that_cannot_be_trained_on_are_named(tokenizer: PreTrainedTokenizerBase, spans: Any, words: str) -> None:
    with pytest.raises(UserError, match=f"row 7.*{words}"):
        encoder(tokenizer).encode({"prompt": "1", "spans": spans}, where="row 7")


CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FORGETS = (  # reasoning of earlier turns is dropped, as Qwen3's template does
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content if loop.last else m.content.split('</think>')[-1] }}<eos>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CONVERSATION = [
    {"role": "system", "content": "s<eos>s"},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "<think>a</think>ONE "},
    {"role": "tool", "content": "seen"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "TWO"},
]


@pytest.mark.parametrize("template", [CHATML, FORGETS])
def test_each_turn_of_the_assistant_is_learnt_as_it_is_and_nothing_else(template: str) -> None:
    tokenizer = build_tokenizer("bytes", None)
    tokenizer.chat_template = template
    example = encoder(tokenizer, max_tokens=200).encode({"messages": CONVERSATION}, where="row")
    assert trained(tokenizer, example) == [
        (False, "<|system|>s<eos>s<eos>\n<|user|>one<eos>\n<|assistant|>"),
        (True, "<think>a</think>ONE <eos>"),
        (False, "\n<|tool|>seen<eos>\n<|user|>two<eos>\n<|assistant|>"),
        (True, "TWO<eos>"),
    ]


def test_a_conversation_of_one_turn_is_learnt_like_prompt_and_response() -> None:
    tokenizer = build_tokenizer("bytes", None)
    tokenizer.chat_template = CHATML
    whole = encoder(tokenizer).encode({"messages": CONVERSATION[4:]}, where="row")
    parted = encoder(tokenizer).encode({"messages": CONVERSATION[4:5], "response": "TWO"}, where="row")
    assert whole.tokens_T.tolist() == parted.tokens_T.tolist()
    assert whole.loss_mask_T.tolist() == parted.loss_mask_T.tolist()


@pytest.mark.parametrize(
    ("changes", "template", "words"),
    [
        ({}, "{% for m in messages %}{{ m.content }};{% endfor %}", "does not end the assistant's turns"),
        ({"tool_calls": [{"name": "f"}]}, CHATML, "does not render the tool calls"),
        ({"tool_calls": [{}]}, CHATML, "call 1 of `tool_calls` does not have the form"),
        ({"content": ""}, CHATML, "must be non-empty text"),
        ({"role": "user"}, CHATML, "must end with one"),
    ],
)
def test_a_conversation_that_cannot_be_learnt_is_named(changes: dict[str, Any], template: str, words: str) -> None:
    tokenizer = build_tokenizer("bytes", None)
    tokenizer.chat_template = template
    messages = [*CONVERSATION[1:5], {**CONVERSATION[5], **changes}]
    with pytest.raises(UserError, match=f"row 7.*{words}"):
        encoder(tokenizer, max_tokens=200).encode({"messages": messages}, where="row 7")


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALLS = [
    {"role": "user", "content": "3 and 4?"},
    {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": '{"x": 3}'}}]},
    {"role": "tool", "content": "7"},
    {"role": "assistant", "content": "7"},
]


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL])])
def test_calls_are_learnt_as_the_template_writes_them_with_the_tools_that_it_declares(tools: Any) -> None:
    template = TEMPLATES["qwen2_5"]
    tokenizer = tokenizer_of(template)
    made = encoder(tokenizer, eos_token_id=tokenizer.eos_token_id, max_tokens=1000)
    example = made.encode({"messages": CALLS, "tools": tools}, where="row")
    declared, *rest = trained(tokenizer, example)
    assert '"name": "add"' in declared[1].partition("</tools>")[0]
    assert rest == [
        (True, '<tool_call>\n{"name": "add", "arguments": {"x": 3}}\n</tool_call><|im_end|>'),
        (False, "\n<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n<|im_start|>assistant\n"),
        (True, "7<|im_end|>"),
    ]
    later = made.encode({"messages": CALLS, "tools": tools}, where="row", num_given=3)
    assert trained(tokenizer, later)[-1] == (True, "7<|im_end|>")
    assert later.loss_mask_T.sum() == len("7") + 1
    one = {"messages": CALLS[:1], "response": "7", "tools": tools}
    assert trained(tokenizer, made.encode(one, where="row"))[0] == declared
    with pytest.raises(UserError, match=r"row 7.*`tools` must be a list"):
        made.encode({"messages": CALLS, "tools": "add"}, where="row 7")
    assert len(made.encode({"prompt": "3", "response": "7", "tools": "add"}, where="row").tokens_T) > 2


def test_row_that_is_too_long_is_named(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(UserError, match=r"row 7.*the limit is 8"):
        encoder(tokenizer, max_tokens=8).encode({"prompt": "1+2+3+4=", "response": "1"}, where="row 7")


def test_row_the_tokenizer_cannot_express_is_named(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(UserError, match=r"row 7.*cannot encode the prompt.*'o', 'n', 'e'"):
        encoder(tokenizer).encode({"prompt": "one", "response": "1"}, where="row 7")
    with pytest.raises(UserError, match=r"row 7.*cannot encode the response.*'x'"):
        encoder(tokenizer).encode({"prompt": "1", "response": "1x"}, where="row 7")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no rows"),
        ("\n\n", "no rows"),
        ('{"prompt": "1", "response": "1"}\n{"prompt": ', ":2: the line is not valid JSON"),
        ('{"prompt": "1"}', "`response` is missing"),
        ('{"prompt": 1, "response": "1"}', "`prompt` is missing"),
        ("[1]", ":1: the line is not a JSON object"),
        ('{"messages": [{"role": "user", "content": "1"}]}', "`response` is missing"),
        ('{"spans": [["1", true]]}', "`prompt` is missing"),
    ],
)
def test_unusable_rows_are_named_by_line(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(text)
    with pytest.raises(UserError, match=words):
        read_rows(file)


def test_rows_of_spans_and_of_whole_conversations_are_read(tmp_path: Path) -> None:
    rows = [{"prompt": "1", "spans": [["2", True]]}, {"messages": CONVERSATION}]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    assert read_rows(tmp_path / "rows.jsonl") == rows


def test_missing_and_binary_rows_are_user_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_rows(tmp_path / "absent.jsonl")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="cannot be read"):
        read_rows(tmp_path / "binary")


def test_every_epoch_shows_each_row_once_in_its_own_order(tokenizer: PreTrainedTokenizerBase) -> None:
    pool = examples(tokenizer)
    seen = [id(one) for batch in _batches(pool, settings(steps=5, batch_size=4), seed=3) for one in batch]
    first, second = seen[: len(pool)], seen[len(pool) : 2 * len(pool)]
    assert sorted(first) == sorted(second) == sorted(id(one) for one in pool)
    assert first != second


def test_gradient_does_not_depend_on_micro_batches(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    from trainer.model.attention import attach

    attach(model, SDPA)
    batch = examples(tokenizer)
    gradients = []
    for budget in (1024, 16):
        model.zero_grad()
        loss = _accumulate_gradient(model, batch, settings(micro_batch_tokens=budget), torch.device("cpu"))
        gradients.append((loss, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}))
    assert gradients[0][0] == pytest.approx(gradients[1][0], rel=1e-5)
    for name, expected in gradients[0][1].items():
        torch.testing.assert_close(gradients[1][1][name], expected, rtol=1e-4, atol=1e-6)


def test_loss_is_the_mean_over_response_tokens(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    from trainer.model.attention import attach

    batch = examples(tokenizer)
    total, count = 0.0, 0
    with torch.no_grad():
        for example in batch:
            ids = torch.from_numpy(example.tokens_T.astype(np.int64))[None]
            logprobs = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0], -1)
            for place in np.flatnonzero(example.loss_mask_T):
                total -= float(logprobs[place - 1, ids[0, place]])
                count += 1
    attach(model, SDPA)
    loss = _accumulate_gradient(model, batch, settings(), torch.device("cpu"))
    assert loss == pytest.approx(total / count, rel=1e-5)


def test_supervised_steps_learn_the_rows(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    losses: dict[int, float] = {}
    optimizer = {"lr": 2e-2, "warmup_steps": 3, "schedule": "constant"}
    run_sft(
        model,
        SDPA,
        examples(tokenizer)[:3],
        settings(steps=40, optimizer=optimizer, log_every=10),
        seed=1,
        report=lambda step, loss, _: losses.__setitem__(step, loss),
    )
    assert list(losses) == [1, 10, 20, 30, 40]
    assert losses[40] < 0.1 < losses[1]


def test_supervised_steps_are_a_pure_function_of_the_seed(tokenizer: PreTrainedTokenizerBase) -> None:
    def trained(seed: int) -> dict[str, torch.Tensor]:
        model = make_model(INIT, tokenizer, seed=1)
        run_sft(model, SDPA, examples(tokenizer), settings(), seed=seed, report=lambda *_: None)
        return dict(model.state_dict())

    first, again, other = trained(1), trained(1), trained(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_rows_are_plain_jsonl(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "response": "#2"}, {"messages": [{"role": "user", "content": "é"}], "response": "x"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    assert read_rows(tmp_path / "rows.jsonl") == rows
