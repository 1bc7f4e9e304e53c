"""The front says the same as what is behind it, and refuses what has no meaning."""

import pytest
import torch

from polyfed.functional.kernel_factor import kernel_factor
from polyfed.functional.kernel_similarity import kernel_distance, kernel_features
from polyfed.functional.kernels import alignment
from polyfed.functional.procrustes import procrustes
from polyfed.functional.rbf_kernel import nystroem_features, rbf_alignment

F64 = torch.float64


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def test_distance_is_the_one_named():
    a, b = draw(20, 5), draw(20, 5, seed=1)
    for factor in (True, False):
        assert kernel_distance("linear", a, b, factor=factor, width=0.5) == alignment(a, b)
        for width in (0.5, 2.0):
            assert kernel_distance("rbf", a, b, factor=factor, width=width) == rbf_alignment(a, b, width, factor)
    assert kernel_distance("procrustes", a, b, factor=False, width=0.5) == procrustes(a, b)
    values = {float(kernel_distance(name, a, b, factor=False)) for name in ("linear", "rbf", "procrustes")}
    assert len(values) == 3
    assert kernel_distance("rbf", a, b, factor=True) != kernel_distance("rbf", a, b, factor=False)


def test_features_lead_to_the_distance_of_the_representation_itself():
    a, b = draw(30, 5), draw(30, 8, seed=1)
    assert kernel_features("linear", b) is b
    generator = torch.Generator().manual_seed(3)
    few = kernel_features("rbf", b, width=0.7, landmarks=6, generator=generator)
    assert torch.equal(few, nystroem_features(b, 0.7, 6, torch.Generator().manual_seed(3)))
    for similarity in ("linear", "rbf"):
        factor = kernel_factor([kernel_features(similarity, b, width=0.7, landmarks=30)], [1.0]).matrix
        through = kernel_distance(similarity, a, factor, factor=True, width=0.7)
        assert float(through) == pytest.approx(
            float(kernel_distance(similarity, a, b, factor=False, width=0.7)), abs=1e-10
        )


def test_what_has_no_meaning_is_refused():
    a = draw(20, 5)
    with pytest.raises(ValueError, match="'procrustes', which compares no kernels"):
        kernel_distance("procrustes", a, a, factor=True)
    with pytest.raises(ValueError, match="one shape"):
        kernel_distance("procrustes", a, draw(20, 4), factor=False)
    with pytest.raises(ValueError, match="'procrustes' compares no kernels"):
        kernel_features("procrustes", a)
    for call in (lambda: kernel_distance("cosine", a, a, factor=False), lambda: kernel_features("cosine", a)):
        with pytest.raises(ValueError, match="linear, rbf, procrustes, got 'cosine'"):
            call()


@pytest.mark.parametrize("name", ["linear", "rbf", "procrustes"])
def test_distances_of_a_network_in_bfloat16_are_computed_in_float32(name):
    a, b = draw(20, 5).bfloat16(), draw(20, 5, seed=1).float()
    expected = kernel_distance(name, a.float(), b, factor=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert kernel_distance(name, a, b, factor=False) == expected
