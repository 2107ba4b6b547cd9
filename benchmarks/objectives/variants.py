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
    "kpop": _corrected("kpop", max_kl=0.05),
    "veto": _corrected("veto", min_ratio=1e-4, max_ratio=100),
    "sequence_rejection": _corrected("sequence_rejection", low=0.1, high=10),
    "kl_rejection": _corrected("kl_rejection", max_kl=0.01, estimator="k3", level="sequence_mean"),
    "no_eos_mask": _corrected("no_eos_mask"),
    "staleness_weight": _corrected("staleness_weight", decay=0.9),
    "staleness_mask": _corrected("staleness_mask", max=4),
    "dual_clip": {"loss": {"dual_clip": 3.0}},
    "gspo": {"loss": {"kind": "gspo", "aggregation": "sequence_mean"}},
    "cispo": {"loss": {"kind": "cispo"}},
    "sapo": {"loss": {"kind": "sapo", "aggregation": "sequence_mean"}},
    "dppo": {"loss": {"kind": "dppo", **BEHAVIOUR}},
    "vespo": {"loss": {"kind": "vespo", **BEHAVIOUR}},
    "bapo": {"loss": {"kind": "bapo", **BEHAVIOUR}},
    "exact_parts": {"version_logprobs": {"keep": 128}, "loss": {"proximal": "version"}},
    "dr_grpo": {
        "loss": {"aggregation": "constant", "constant_divisor": 48}, "advantage": {"kind": "grpo_no_std"},
    },
    "lite_ppo": {"advantage": {"kind": "lite_ppo"}},
    "rloo": {"advantage": {"kind": "rloo"}},
    "reinforce_pp": {
        "advantage": {"kind": "reinforce_pp"},
        "loss": {"kl_coef": 0.001, "kl_in": "reward", "kl_estimator": "k1"},
    },
    "lr_by_ess": {"lr_by_ess": {}},
    "opob": {"advantage": {"kind": "opob", "options": {"gradient_norm": "length"}}},
}  # fmt: skip
"""By name; what is not given has its default. `decoupled` is the default of the product. `balance_heuristic` is not
here: where all tokens of a step have the same version it is the token weight. `no_eos_mask` does not depend on
staleness, but on how many answers are cut at the token limit. `staleness_mask` is `decoupled` at lags up to its bound,
and trains on nothing at larger ones."""
OBJECTIVE_KEYS = ("aggregation", "constant_divisor", "kl_coef", "kl_in", "kl_estimator")
"""Keys of `loss` that say what is optimised, not how stale samples count."""
OBJECTIVE_CORRECTIONS = ("no_eos_mask",)
"""Corrections of the same kind: on-policy samples are masked by them as well."""

WITHOUT_GRADIENTS = ("lr_by_ess",)
"""Variants that change the update, not the gradient."""


def settings_of(name: str, **common: Any) -> TrainerSettings:
    """The section `trainer` of a variant. common: keys that all variants share."""
    return TrainerSettings.model_validate({"device": "cpu", **common, **VARIANTS[name]})


def reference_of(name: str, **common: Any) -> TrainerSettings:
    """The on-policy objective with the variant's own advantage, aggregation, KL and mask of cut answers: REINFORCE,
    since on samples of the policy itself the ratio and the weight are 1.
    """
    variant = VARIANTS[name]
    loss = variant.get("loss", {})
    kept = {key: loss[key] for key in OBJECTIVE_KEYS if key in loss}
    corrections = [one for one in loss.get("corrections", ()) if one["kind"] in OBJECTIVE_CORRECTIONS]
    section = {"loss": {"weight": {"mode": "exact"}, "corrections": corrections, **kept}}
    section |= {"advantage": variant["advantage"]} if "advantage" in variant else {}
    return TrainerSettings.model_validate({"device": "cpu", **common, **section})
