"""The objectives that are compared: each is a section `trainer` as a user would write it (docs/algorithms.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.config import TrainerSettings

BEHAVIOUR: dict[str, Any] = {"proximal": "behaviour", "weight": {"mode": "off"}}
"""For losses whose ratio contains the behaviour policy."""
NO_WEIGHT: dict[str, Any] = {"weight": {"mode": "off"}}


def _corrected(kind: str, **options: Any) -> dict[str, Any]:
    """A correction in addition to the default weight."""
    return {"loss": {"corrections": [{"kind": kind, "options": options}]}}


VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "decoupled": {},
    "ppo": {"loss": BEHAVIOUR},
    "exact_weight": {"loss": {"weight": {"mode": "exact"}}},
    "icepop": {"loss": {"weight": {"mode": "mask", "low": 0.5, "max": 5.0}}},
    "sequence_weight": {
        "loss": {**NO_WEIGHT, "corrections": [{"kind": "sequence_weight", "options": {"max": 2.0}}]},
    },
    "geometric_mask": _corrected("geometric_mask"),
    "m2po": _corrected("m2po"),
    "opsm": _corrected("opsm", max_kl=0.05),
    "staleness_weight": _corrected("staleness_weight", decay=0.9),
    "gspo": {"loss": {"kind": "gspo", "aggregation": "sequence_mean"}},
    "cispo": {"loss": {"kind": "cispo"}},
    "sapo": {"loss": {"kind": "sapo", "aggregation": "sequence_mean"}},
    "dppo": {"loss": {"kind": "dppo", **BEHAVIOUR}},
    "vespo": {"loss": {"kind": "vespo", **BEHAVIOUR}},
    "bapo": {"loss": {"kind": "bapo", **BEHAVIOUR}},
    "exact_parts": {"version_logprobs": {"keep": 128}, "loss": {"proximal": "version"}},
    "lr_by_ess": {"lr_by_ess": {}},
    "opob": {"advantage": {"kind": "opob", "options": {"gradient_norm": "length"}}},
}
"""By name; what is not given has its default. `decoupled` is the default of the product. `balance_heuristic` is not
here: where all tokens of a step have the same version it is the token weight."""

WITHOUT_GRADIENTS = ("lr_by_ess",)
"""Variants that change the update, not the gradient."""


def settings_of(name: str, **common: Any) -> TrainerSettings:
    """The section `trainer` of a variant. common: keys that all variants share."""
    return TrainerSettings.model_validate({"device": "cpu", **common, **VARIANTS[name]})


def reference_of(name: str, **common: Any) -> TrainerSettings:
    """The on-policy objective with the same advantage and aggregation: REINFORCE, since on samples of the policy itself
    the ratio and the weight are 1.
    """
    section = dict(VARIANTS[name])
    loss = section.get("loss", {})
    kept = {"aggregation": loss["aggregation"]} if "aggregation" in loss else {}
    section = {"loss": {"weight": {"mode": "exact"}, **kept}} | (
        {"advantage": section["advantage"]} if "advantage" in section else {}
    )
    return TrainerSettings.model_validate({"device": "cpu", **common, **section})
