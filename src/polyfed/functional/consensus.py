"""What several networks say together: a consensus weighted by confidence, and what those say who see it otherwise.

Shapes: S networks, N samples, C classes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from polyfed.functional.losses import cross_entropy, kl_divergence


class Consensus(NamedTuple):
    """What is agreed on, and what those say who see it otherwise.

    labels: (N,) int64. others: (N, C) mean scores of those whose highest score is another class, 0 where there is
    nobody. disagreement: (N,) bool, whether there is anybody.
    """

    labels: Tensor
    others: Tensor
    disagreement: Tensor


def confidence_weights(v_SN: Tensor, counted_SN: Tensor) -> Tensor:
    """Shares (S, N): v over its sum among those counted, 0 for the others; equal ones where all counted have v = 0.

    The paper's alpha. They sum to 1 for every sample, or to 0 where nobody is counted.
    """
    kept_SN = torch.where(counted_SN, v_SN, torch.zeros_like(v_SN))
    kept_SN = torch.where(kept_SN.sum(dim=0) > 0, kept_SN, counted_SN.to(v_SN))
    total_N = kept_SN.sum(dim=0)
    return kept_SN / torch.where(total_N > 0, total_N, torch.ones_like(total_N))


def consensus(scores_SNC: Tensor) -> Consensus:
    """The class with the highest score in sum_s alpha_s score_s, and the same mean over those who see another class.

    A network is as sure of a sample, v, as the variance over the classes of its scores, which is also that of
    logarithms of probabilities. All is in float64, so that the order of the networks does not show.

    Source: Cho et al. (Fed-ET), IJCAI 2022, section 3.2, weighted consensus and diversity.
    """
    wide_SNC = scores_SNC.double()
    v_SN = wide_SNC.var(dim=2, correction=0)
    everybody_SN = torch.ones_like(v_SN, dtype=torch.bool)
    labels_N = torch.einsum("sn,snc->nc", confidence_weights(v_SN, everybody_SN), wide_SNC).argmax(dim=1)
    differs_SN = wide_SNC.argmax(dim=2) != labels_N
    others_NC = torch.einsum("sn,snc->nc", confidence_weights(v_SN, differs_SN), wide_SNC)
    return Consensus(labels_N, others_NC.to(scores_SNC.dtype), differs_SN.any(dim=0))


def transfer_loss(scores_NC: Tensor, agreed: Consensus, diversity: float) -> Tensor:
    """The mean of CE(scores, labels), and of diversity * KL(softmax(others) || softmax(scores)) where others there are.

    What is agreed on is a constant for the gradient; diversity is lambda.

    Source: Fed-ET, the server's objective.
    """
    ones_N = torch.ones_like(scores_NC[:, 0])
    loss = cross_entropy(scores_NC, agreed.labels, ones_N)
    if not diversity:
        return loss
    disagreement_N = agreed.disagreement.to(scores_NC)
    return loss + diversity * disagreement_N.mean() * kl_divergence(scores_NC, agreed.others, disagreement_N)
