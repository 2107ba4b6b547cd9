"""How far the current policy is from the one that sampled a batch.

Legend: N sampled tokens, S sequences.
"""

from __future__ import annotations

import torch

from trainer.backends.port import Backend
from trainer.data.batch import PreparedBatch
from trainer.objectives.port import LOG_RATIO_CLAMP


@torch.no_grad()
def off_policy(prepared: PreparedBatch, policy: Backend, device: torch.device) -> dict[str, float]:
    """Compare a batch's recorded log-probs with those of the current policy, on one rank.

    Args:
        prepared: the batch.
        policy: the policy.
        device: where it is.

    Returns:
        ess: effective sample size of the weights exp(p - b) of tokens, as a share, (sum w)^2 / (N sum w^2).
        answer_ess: the same of whole sequences, whose weight is the product of those of its tokens.
        kl_nats: estimate of KL(behaviour || policy) per token, the mean of exp(p - b) - (p - b) - 1.
    """
    tokens, answers = [], []
    for mini_batch in prepared.mini_batches:
        for micro_batch in mini_batch:
            if micro_batch.is_dummy:
                continue
            current_N, _ = policy.logprobs(micro_batch.to(device).packed, with_entropy=False)
            difference_N = (current_N.cpu() - micro_batch.inputs.behaviour_N.cpu()).double()
            tokens.append(difference_N)
            sums_S = difference_N.new_zeros(len(micro_batch.packed.lengths))
            answers.append(sums_S.index_add(0, micro_batch.packed.sequence_N.cpu(), difference_N))
    log_weight_N = torch.cat(tokens).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    kl_N = log_weight_N.exp() - log_weight_N - 1.0
    return {
        "ess": share(log_weight_N), "answer_ess": share(torch.cat(answers)), "kl_nats": float(kl_N.mean()),
    }  # fmt: skip


def share(log_weight_N: torch.Tensor) -> float:
    """Effective sample size of weights as a share of their number; 1 if all are equal."""
    weight_N = (log_weight_N - log_weight_N.max()).exp()  # the share does not depend on a common factor
    return float(weight_N.sum().square() / (len(weight_N) * weight_N.square().sum()))
