"""The ways to compare representations behind one pair of functions.

    similarity    distance to a target                            a factor as the target
    linear        1 - CKA of linear kernels, kernels.py           yes, of any mean of kernels
    rbf           1 - CKA of RBF kernels, rbf.py                  yes, of a mean of RBF kernels
    procrustes    orthogonal Procrustes distance, procrustes.py   no: it compares no kernels

Shapes: L rows (the same inputs for all), D and E feature widths, m columns of features.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from polyfed.functional.kernels import alignment
from polyfed.functional.procrustes import procrustes
from polyfed.functional.rbf_kernel import nystroem_features, rbf_alignment

Similarity = Literal["linear", "rbf", "procrustes"]


def kernel_distance(
    similarity: Similarity, a_LD: Tensor, target_LE: Tensor, *, factor: bool, width: float = 0.5
) -> Tensor:
    """How far A is from the target (0-d): in [0, 1], with "procrustes" in [0, 2]; differentiable in A.

    Args:
        similarity: a row of the table above.
        a_LD: representation.
        target_LE: the same rows of a factor of a kernel, or of another representation.
        factor: whether the target is a factor; "linear" does not need to know.
        width: f of "rbf": each width is f times the median distance between rows; the others do not look at it.

    Raises:
        ValueError: an unknown similarity; "procrustes" with a factor, or with another width than A's; rows differ.
    """
    with torch.autocast(a_LD.device.type, enabled=False):  # a network may compute in bfloat16, kernels may not
        a_LD = a_LD.float() if a_LD.dtype == torch.bfloat16 else a_LD
        if similarity == "linear":
            return alignment(a_LD, target_LE)
        if similarity == "rbf":
            return rbf_alignment(a_LD, target_LE, width, factor)
        _procrustes_only(similarity)
        if factor:
            raise ValueError("expected a representation as the target of 'procrustes', which compares no kernels")
        return procrustes(a_LD, target_LE)


def kernel_features(
    similarity: Similarity,
    a_LD: Tensor,
    *,
    width: float = 0.5,
    landmarks: int = 512,
    generator: torch.Generator | None = None,
) -> Tensor:
    """(L, m) whose linear kernel is A's kernel: what `kernels.kernel_factor` stacks to a factor of the mean kernel.

    "linear": A itself. "rbf": Nystroem features of ``landmarks`` rows drawn by the generator, exact with L or more.

    Raises:
        ValueError: an unknown similarity, or "procrustes", which has no kernel; landmarks or width out of range.
    """
    if similarity == "linear":
        return a_LD
    if similarity == "rbf":
        return nystroem_features(a_LD, width, landmarks, generator)
    _procrustes_only(similarity)
    raise ValueError("expected 'linear' or 'rbf': 'procrustes' compares no kernels")


def _procrustes_only(similarity: str) -> None:
    if similarity != "procrustes":
        raise ValueError(f"expected a similarity among linear, rbf, procrustes, got '{similarity}'")
