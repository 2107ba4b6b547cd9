"""The longest sequence that a model's positions cover exactly, as config.json of any age says it."""

from __future__ import annotations

from typing import Any

import pytest

from areal_like.context_limit import ContextLimit, context_limit
from areal_like.errors import UserError

FACTORS = {"short_factor": [1.0, 1.0], "long_factor": [2.0, 3.0]}
LONGROPE = {"rope_type": "longrope", **FACTORS}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, None),
        ({"max_position_embeddings": 128}, ContextLimit(128)),
        ({"n_positions": 1024}, ContextLimit(1024)),
        ({"max_position_embeddings": True}, None),
        ({"text_config": {"max_position_embeddings": 64}}, ContextLimit(64)),
        ({"max_position_embeddings": 128, "rope_scaling": None}, ContextLimit(128)),
        (
            {"max_position_embeddings": 128, "original_max_position_embeddings": 32, "rope_scaling": LONGROPE},
            ContextLimit(32, "longrope"),
        ),
        (
            {
                "max_position_embeddings": 128,
                "rope_parameters": {**LONGROPE, "original_max_position_embeddings": 32},
            },
            ContextLimit(32, "longrope"),
        ),
        (  # the first Phi-3 configs
            {
                "max_position_embeddings": 128,
                "original_max_position_embeddings": 32,
                "rope_scaling": {"type": "su", **FACTORS},
            },
            ContextLimit(32, "longrope"),
        ),
        (  # a smaller model of the family: the limit is what it has, and still the rotation's
            {"max_position_embeddings": 32, "original_max_position_embeddings": 32, "rope_parameters": LONGROPE},
            ContextLimit(32, "longrope"),
        ),
        (  # one set of frequencies for all lengths
            {
                "max_position_embeddings": 128,
                "original_max_position_embeddings": 32,
                "rope_parameters": {"rope_type": "longrope", "short_factor": [2.0], "long_factor": [2.0]},
            },
            ContextLimit(128),
        ),
        (  # PhiMoE scales by the length, too
            {
                "max_position_embeddings": 128,
                "original_max_position_embeddings": 32,
                "rope_parameters": {
                    "rope_type": "longrope", "short_factor": [2.0], "long_factor": [2.0],
                    "short_mscale": 1.0, "long_mscale": 1.2,
                },
            },
            ContextLimit(32, "longrope"),
        ),
        (
            {"max_position_embeddings": 128, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
            ContextLimit(128, "dynamic"),
        ),
        (
            {
                "max_position_embeddings": 128,
                "rope_parameters": {
                    "full_attention": {"rope_type": "dynamic", "original_max_position_embeddings": 64},
                    "sliding_attention": {"rope_type": "default"},
                },
            },
            ContextLimit(128, "dynamic"),
        ),
        (
            {
                "max_position_embeddings": 128,
                "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
            },
            ContextLimit(128),
        ),
        (
            {
                "max_position_embeddings": 128,
                "rope_parameters": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32},
            },
            ContextLimit(128),
        ),
    ],
)  # fmt: skip
def test_limit_is_read_from_configs_of_any_age(config: dict[str, Any], expected: ContextLimit | None) -> None:
    assert context_limit(config) == expected


def test_a_context_beyond_the_limit_is_refused_with_its_reason() -> None:
    limit = ContextLimit(32, "longrope")
    limit.check(32, where="here")
    assert limit.cap(20, where="here") == 20
    with pytest.raises(UserError, match=r"33 is more than 32 positions.*longrope.*at most 32, or set short_factor"):
        limit.cap(33, where="here")
    assert ContextLimit(32).cap(33, where="here") == 32
    with pytest.raises(UserError, match="max_position_embeddings"):
        ContextLimit(32).check(33, where="here")


DYNAMIC = {"rope_type": "dynamic"}
ORIGINAL = {"original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_position_embeddings": 0}, None),
        ({"max_position_embeddings": 1}, ContextLimit(1)),
        ({"max_position_embeddings": 128.0}, None),
        ({"max_position_embeddings": None, "n_positions": 7}, ContextLimit(7)),
        ({"max_position_embeddings": 128, "n_positions": 7}, ContextLimit(128)),
        ({"max_position_embeddings": 128, "text_config": None}, ContextLimit(128)),
        ({"max_position_embeddings": 128, "text_config": {"max_position_embeddings": 64}}, ContextLimit(64)),
        ({"rope_scaling": DYNAMIC}, None),
        ({"rope_scaling": {**LONGROPE, **ORIGINAL}}, ContextLimit(32, "longrope")),
        ({"max_position_embeddings": 16, "rope_scaling": {**LONGROPE, **ORIGINAL}}, ContextLimit(16, "longrope")),
        ({"max_position_embeddings": 128, "rope_scaling": {**DYNAMIC, **ORIGINAL}}, ContextLimit(128, "dynamic")),
        ({"max_position_embeddings": 128, "rope_scaling": [DYNAMIC]}, ContextLimit(128)),
        ({"max_position_embeddings": 128, "rope_scaling": {"rope_type": 3}}, ContextLimit(128)),
        ({"max_position_embeddings": 128, "rope_scaling": {"type": "su"}, **ORIGINAL}, ContextLimit(128)),
        ({"max_position_embeddings": 128, "rope_scaling": {"type": "yarn", **FACTORS}, **ORIGINAL},
         ContextLimit(32, "longrope")),
        ({"max_position_embeddings": 128, "rope_parameters": {"a": {**LONGROPE, **ORIGINAL}, "b": DYNAMIC}},
         ContextLimit(32, "longrope")),
        ({"max_position_embeddings": 8, "rope_parameters": {}, "rope_scaling": DYNAMIC}, ContextLimit(8, "dynamic")),
    ],
)  # fmt: skip
def test_limit_is_the_smallest_that_a_config_names(config: dict[str, Any], expected: ContextLimit | None) -> None:
    assert context_limit(config) == expected


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (ContextLimit(32), "33 is more than the model's max_position_embeddings (32) -> at most 32"),
        (
            ContextLimit(32, "dynamic"),
            "33 is more than 32 positions, beyond which the model's dynamic frequencies depend on the longest sequence "
            "of a pass, so log-probs would be wrong -> at most 32",
        ),
        (
            ContextLimit(32, "longrope"),
            "33 is more than 32 positions, beyond which the model's longrope frequencies depend on the longest "
            "sequence of a pass, so log-probs would be wrong -> at most 32, or set short_factor to long_factor in its "
            "config.json (one for all lengths)",
        ),
    ],
)
def test_excess_is_said_with_the_reason_and_the_remedy(limit: ContextLimit, words: str) -> None:
    assert limit.excess(32) == ""
    assert limit.cap(32, where="here") == 32
    with pytest.raises(UserError) as refused:
        limit.check(33, where="here")
    assert str(refused.value) == f"here: {words}"
