"""The quickstart's task: splits never meet, rows are a function of the seed, demonstrations are wrong as configured."""

from __future__ import annotations

import hashlib
import json
import statistics
import subprocess
import sys
from itertools import islice

import pytest

from areal_like.errors import UserError
from areal_like.tasks import running_sum

RECIPE = {"bias": 0.45, "bias_right": 0.35, "noise": 0.1}


def test_row_is_prompt_answer_and_terms() -> None:
    assert running_sum.make_row([3, 8, 5]) == {"prompt": "3+8+5=", "answer": "6", "terms": [3, 8, 5]}


def test_held_out_prompts_occur_in_neither_sft_nor_rl_whatever_the_seeds() -> None:
    held_out = {row["prompt"] for seed in range(3) for row in running_sum.rows(seed, "eval")}
    trained = {row["prompt"] for seed in range(3) for row in running_sum.rows(seed, "train", limit=4000)}
    shown = {row["prompt"] for seed in range(3) for row in running_sum.demonstrations(seed, RECIPE, 4000)}
    assert not held_out & trained
    assert not held_out & shown
    assert not trained & shown
    for name, prompts in (("eval", held_out), ("train", trained), ("sft", shown)):
        assert {running_sum.part_of(prompt) for prompt in prompts} == {name}


def test_every_part_has_short_prompts() -> None:
    two_terms = [running_sum.make_row([a, b])["prompt"] for a in range(10) for b in range(10)]
    for split in ("sft", "train", "eval"):
        assert sum(running_sum.part_of(prompt) == split for prompt in two_terms) >= 10


def test_eval_prompts_are_distinct_and_finite() -> None:
    prompts = [row["prompt"] for row in running_sum.rows(1, "eval")]
    assert len(prompts) == len(set(prompts)) == running_sum.DEFAULT_EVAL_ROWS


def test_eval_of_few_possible_prompts_ends() -> None:
    rows = list(running_sum.rows(1, "eval", options={"max_terms": 2}))
    assert 10 <= len(rows) <= 40
    assert all(len(row["terms"]) == 2 for row in rows)


def test_rows_are_a_function_of_the_seed_and_a_longer_limit_extends_a_shorter_one() -> None:
    for split in ("sft", "train", "eval"):
        short, long = list(running_sum.rows(7, split, limit=50)), list(running_sum.rows(7, split, limit=90))
        assert long[:50] == short
        assert short != list(running_sum.rows(8, split, limit=50))
    assert list(islice(running_sum.rows(7, "train"), 50)) == list(running_sum.rows(7, "train", limit=50))
    first = list(running_sum.demonstrations(7, RECIPE, 50))
    assert first == list(running_sum.demonstrations(7, RECIPE, 90))[:50]


@pytest.mark.processes
def test_rows_are_the_same_in_another_process() -> None:
    code = "from areal_like.tasks.running_sum import rows; print([r['prompt'] for r in rows(3, 'train', limit=20)])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300).stdout
    assert out.strip() == str([row["prompt"] for row in running_sum.rows(3, "train", limit=20)])


def test_number_of_terms_has_the_long_tail() -> None:
    counts = [len(row["terms"]) for row in running_sum.rows(1, "train", limit=8000)]
    assert min(counts) == 2
    assert max(counts) == 16
    assert statistics.mean(counts) == pytest.approx(5.0, abs=0.25)


def test_the_right_working_is_correct_and_anything_else_is_not() -> None:
    row = running_sum.make_row([3, 8, 5])
    assert running_sum.solve(row["prompt"]) == "3+8=1,1+5=6;#6"
    assert running_sum.is_correct(row, "3+8=1,1+5=6;#6")
    assert running_sum.is_correct(row, "#5#6")
    assert not running_sum.is_correct(row, "3+8=1,1+5=6;#6", "length")
    for response in ("", "6", "#", "#66", "#6 ", "#6#5", "3+8=1,1+5=6;6#"):
        assert not running_sum.is_correct(row, response)


def test_every_row_is_solved_by_its_own_working() -> None:
    for row in running_sum.rows(5, "train", limit=500):
        assert running_sum.is_correct(row, running_sum.solve(row["prompt"]))
        assert set(row["prompt"] + running_sum.solve(row["prompt"])) <= set(running_sum.CHARACTERS)


@pytest.mark.parametrize("text", ["", "=", "3=", "3+8", "3+12=", "a+b=", "3++8=", "3+²="])
def test_solve_refuses_another_text(text: str) -> None:
    with pytest.raises(ValueError, match="not a running sum"):
        running_sum.solve(text)


def test_demonstrations_are_wrong_as_often_as_configured() -> None:
    right = wrong = fixed = 0
    table = running_sum.wrong_table(0.45)
    for demo in running_sum.demonstrations(1, RECIPE, 4000):
        for step in demo["response"].split(";")[0].split(","):
            left, right_digit, result = int(step[0]), int(step[2]), int(step[4])
            if (left, right_digit) in table:
                fixed += 1
                right += result == (left + right_digit) % 10
                wrong += result == table[left, right_digit]
    assert right + wrong == fixed
    assert right / fixed == pytest.approx(0.35, abs=0.03)
    assert 0.3 < len(table) / 100 < 0.6
    assert all(table[pair] != sum(pair) % 10 for pair in table)


def test_demonstrations_without_bias_and_noise_are_right() -> None:
    for demo in running_sum.demonstrations(1, {"bias": 0.0, "noise": 0.0}, 200):
        assert demo["response"] == running_sum.solve(demo["prompt"])


@pytest.mark.parametrize(
    ("options", "word"), [({"biass": 1}, "biass"), ({"bias": 2}, "bias"), ({"max_terms": 1}, "max_terms")]
)
def test_a_bad_option_is_the_users_mistake_and_names_the_key(options: dict, word: str) -> None:
    with pytest.raises(UserError, match=word):
        running_sum.rows(1, "train", options=options)


def test_an_unknown_part_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match="test"):
        running_sum.rows(1, "test")  # type: ignore[arg-type]


def fingerprint(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


@pytest.mark.parametrize(
    ("split", "first", "all_300"),
    [
        ("sft", "2+6=", "658d54576bf774ec"),
        ("train", "3+7+4+7=", "84286f24d6356514"),
        ("eval", "7+2+3+1+6+5+1+9+2=", "6f67aa2c89770ec9"),
    ],
)
def test_rows_of_a_seed_are_those_of_every_release(split: running_sum.Split, first: str, all_300: str) -> None:
    """A run that is resumed after an update goes on with the rows it had; published scores stay comparable."""
    rows = list(islice(running_sum.rows(3, split), 300))
    assert rows[0]["prompt"] == first
    assert fingerprint(rows) == all_300


def test_demonstrations_of_a_seed_are_those_of_every_release() -> None:
    running_sum.wrong_table.cache_clear()
    shown = list(islice(running_sum.demonstrations(3), 300))
    assert shown[0] == {"prompt": "2+6=", "response": "2+6=8;#8"}
    assert fingerprint(shown) == "1415969f65c48e91"
    assert fingerprint(sorted([*pair, wrong] for pair, wrong in running_sum.wrong_table(0.45).items())) == (
        "25924fe31ec33da9"
    )


@pytest.mark.parametrize(
    ("options", "word"),
    [({"max_terms": 1}, "max_terms"), ({"pgeo": 0}, "pgeo"), ({"pgeo": 1.1}, "pgeo"), ({"bias": -0.1}, "bias"),
     ({"bias_right": 1.1}, "bias_right"), ({"noise": 1.5}, "noise")],
)  # fmt: skip
def test_options_at_their_ends_are_taken_and_beyond_them_refused(options: dict[str, float], word: str) -> None:
    least = {"bias": 0, "bias_right": 0, "noise": 0}
    for ends in ({"max_terms": 2, "pgeo": 1}, least, dict.fromkeys(least, 1)):
        assert len(list(running_sum.rows(1, "train", limit=3, options=ends))) == 3
    with pytest.raises(UserError, match=word):
        running_sum.rows(1, "train", options=options)


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_as_many_rows_come_as_asked_for(limit: int) -> None:
    assert len(list(running_sum.rows(1, "eval", limit=limit))) == limit
    with pytest.raises(UserError, match="at least 0, not -1"):
        running_sum.rows(1, "eval", limit=-1)


def test_an_answer_that_was_cut_off_is_not_correct_however_it_ends() -> None:
    row = running_sum.make_row([3, 8])
    assert running_sum.is_correct(row, "3+8=1;#1")
    assert running_sum.is_correct(row, "#2;#1", "stop")
    assert not running_sum.is_correct(row, "3+8=1;#1", "length")
    assert not running_sum.is_correct(row, "1")


@pytest.mark.parametrize(
    ("key", "right", "wrong"),
    [
        ("pgeo", (1e-9, 1.0), (0.0, 1.1)), ("max_terms", (2,), (1,)), ("bias", (0.0, 1.0), (-0.1, 1.1)),
        ("bias_right", (0.0, 1.0), (-0.1, 1.1)), ("noise", (0.0, 1.0), (-0.1, 1.1)),
    ],
)  # fmt: skip
def test_options_have_bounds(key: str, right: tuple[float, ...], wrong: tuple[float, ...]) -> None:
    for value in right:
        assert getattr(running_sum.RunningSumOptions.parse({key: value}), key) == value
    for value in wrong:
        with pytest.raises(UserError) as refused:
            running_sum.RunningSumOptions.parse({key: value})
        assert refused.value.where == f"running_sum options.{key}"
        assert refused.value.remedy == "options are pgeo, max_terms, bias, bias_right, noise"


def test_rows_cannot_be_fewer_than_none() -> None:
    assert list(running_sum.rows(1, "train", limit=0)) == []
    with pytest.raises(UserError, match="the limit must be at least 0, not -1 -> set a limit of 0 or more"):
        running_sum.rows(1, "train", limit=-1)
