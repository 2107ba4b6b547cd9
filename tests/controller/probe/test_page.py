"""The page of a probe: which numbers it shows, how, and where they were not measured."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from areal_like.probe_files import ProbeAnswer, ProbeAnswers, TryVerdict
from areal_like.wire.messages import Sampling
from controller.probe.finding import Finding, GoldTry, Seen
from controller.probe.page import MAX_CHARS, as_json, as_text


def answer(row: int, text: str, *, is_cut: bool = False) -> ProbeAnswer:
    tokens = list(range(len(text)))
    logprobs = [-1.0] * len(text)
    return ProbeAnswer(row=row, text=text, prompt_P=[1], tokens_R=tokens, logprobs_R=logprobs, is_cut=is_cut)


def scored(value: float) -> TryVerdict:
    return TryVerdict(kind="scored", value=value, correct=None, reason="")


SEEN = Seen(
    [{"prompt": "1+1="}, {"prompt": "2+2="}],
    ProbeAnswers(
        answers=[answer(0, "a"), answer(0, "bb", is_cut=True), answer(1, "ccc"), answer(1, "dddd")],
        prompts=["<bos>1+1=", "<bos>2+2="],
        stop_tokens=["<eos>", "<end>"],
        has_chat_template=True,
    ),
    Sampling(),
    [scored(1.0), scored(0.0), scored(0.5), scored(0.5)],
    [GoldTry(0, "answer", "2", scored(1.0)), GoldTry(1, "answer", "4", scored(0.5)), GoldTry(1, "n", "4", scored(9.0))],
    [[-1.5]],
)
FINDING = Finding("kind", "What it is.", "what to do")
NOTHING = Seen([], ProbeAnswers(), Sampling())


def test_json_has_every_number_and_the_samples_with_their_own_rewards() -> None:
    assert json.loads(as_json("mine", SEEN, [FINDING], ["a remark"])) == {
        "name": "mine",
        "num_prompts": 2,
        "num_samples": 4,
        "pass_rate": 0.75,
        "mean_reward": 0.5,
        "signal_share": 0.5,
        "cut_share": 0.25,
        "gold_reward": 0.75,
        "stop_tokens": ["<eos>", "<end>"],
        "has_chat_template": True,
        "logprob_difference": {"mean": 0.5, "max": 0.5},
        "findings": [{"kind": "kind", "sentence": "What it is.", "remedy": "what to do"}],
        "notes": ["a remark"],
        "prompt": "<bos>1+1=",
        "samples": [
            {"row": 0, "text": "a", "num_tokens": 1, "is_cut": False, "reward": 1.0},
            {"row": 1, "text": "ccc", "num_tokens": 3, "is_cut": False, "reward": 0.5},
            {"row": 0, "text": "bb", "num_tokens": 2, "is_cut": True, "reward": 0.0},
            {"row": 1, "text": "dddd", "num_tokens": 4, "is_cut": False, "reward": 0.5},
        ],
    }


def test_json_is_indented_text_that_keeps_its_letters_and_ends_its_line() -> None:
    text = as_json("für mich", NOTHING, [], [])
    assert text.startswith('{\n  "name": "für mich",\n')
    assert text.endswith("}\n")


def test_json_has_null_for_what_was_not_measured() -> None:
    page = json.loads(as_json("mine", NOTHING, [], []))
    absent = {"pass_rate", "mean_reward", "signal_share", "cut_share", "gold_reward", "logprob_difference", "prompt"}
    assert {name for name, value in page.items() if value is None} == absent
    assert (page["num_prompts"], page["num_samples"], page["samples"]) == (0, 0, [])


def test_text_shows_the_same_numbers_then_samples_then_causes_then_notes() -> None:
    assert as_text("mine", SEEN, [FINDING], ["a remark"]) == (
        "probe of mine: 2 prompts, 4 samples of the starting model\n"
        "  pass rate                     75%\n"
        "  mean reward                   0.500\n"
        "  groups with signal            50%\n"
        "  truncated at the length limit 25%\n"
        "  reward of gold answers        0.750\n"
        "  chat template                 yes\n"
        "  ends an answer                <eos> <end>\n"
        "  engine and trainer differ by  5.0e-01 nat on average, 5.0e-01 at most\n"
        "\n"
        'first prompt: "<bos>1+1="\n'
        '  row 0  reward 1.000  1 tokens, complete: "a"\n'
        '  row 1  reward 0.500  3 tokens, complete: "ccc"\n'
        '  row 0  reward 0.000  2 tokens, truncated: "bb"\n'
        '  row 1  reward 0.500  4 tokens, complete: "dddd"\n'
        "\n"
        "kind: What it is.\n"
        "  -> what to do\n"
        "note: a remark\n"
    )


def test_text_says_what_was_not_measured_and_that_nothing_was_found() -> None:
    assert as_text("mine", NOTHING, [], []) == (
        "probe of mine: 0 prompts, 0 samples of the starting model\n"
        "  pass rate                     not measured\n"
        "  mean reward                   -\n"
        "  groups with signal            not measured\n"
        "  truncated at the length limit not measured\n"
        "  reward of gold answers        -\n"
        "  chat template                 none\n"
        "  ends an answer                nothing\n"
        "  engine and trainer differ by  not measured\n"
        "\n"
        "no reason was found why the reward would stay flat\n"
    )


def test_samples_of_different_prompts_come_first_and_no_more_than_five_are_shown() -> None:
    answers = [answer(row, f"{row}{letter}") for row in range(4) for letter in "xy"]
    seen = replace(SEEN, sampled=ProbeAnswers(answers=answers), verdicts=[])
    shown = json.loads(as_json("mine", seen, [], []))["samples"]
    assert [one["text"] for one in shown] == ["0x", "1x", "2x", "3x", "0y"]
    assert len(shown) == 5
    assert {one["reward"] for one in shown} == {None}, "nothing was scored"
    assert "row 0  reward -  2 tokens" in as_text("mine", seen, [], [])


def test_difference_of_log_probs_is_shown_by_its_mean_and_its_largest() -> None:
    seen = replace(SEEN, trainer_logprobs=[[-1.5], [-1.0, -1.0]])
    shown = json.loads(as_json("mine", seen, [], []))["logprob_difference"]
    assert shown == {"mean": pytest.approx(0.5 / 3), "max": 0.5}


def test_reward_is_shown_with_its_own_answer_or_not_at_all() -> None:
    with pytest.raises(ValueError):
        as_text("mine", replace(SEEN, verdicts=SEEN.verdicts[1:]), [], [])


def test_letters_of_every_script_are_shown_as_they_are() -> None:
    seen = replace(SEEN, sampled=ProbeAnswers(prompts=["Größe 好"]), verdicts=[])
    assert 'first prompt: "Größe 好"' in as_text("mine", seen, [], [])


def test_long_and_dangerous_texts_are_cut_and_escaped_on_a_terminal_alone() -> None:
    just, over = "x" * MAX_CHARS, "y" * (MAX_CHARS + 1)
    seen = replace(SEEN, sampled=ProbeAnswers(answers=[answer(0, just), answer(1, over)], prompts=["\x1b[2J"]))
    seen = replace(seen, verdicts=[])
    said = as_text("mine", seen, [], [])
    assert f'"{just}"' in said
    assert f'"{over[:-1]}..."' in said
    assert 'first prompt: "\\\\x1b[2J"' in said
    assert json.loads(as_json("mine", seen, [], []))["samples"][1]["text"] == over
