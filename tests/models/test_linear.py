"""Linears that oneDNN packs, and norms: the right values, and the same bits of a row however many rows come along."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from adaptivespec.models import linear as linear_module
from adaptivespec.models.linear import Linear, can_prepack
from adaptivespec.models.native import ops
from adaptivespec.models.norm import RMSNorm

OUT, IN = 640, 192
packs = pytest.mark.skipif(not can_prepack(), reason="this CPU or torch has no prepacked bf16 linear")


@pytest.fixture
def doubling(monkeypatch: pytest.MonkeyPatch) -> Linear:
    """A linear that runs two rows as four."""
    monkeypatch.setattr(linear_module, "DOUBLED_BYTES", 0)
    monkeypatch.setattr(ops, "library", lambda: None)
    return Linear(torch.randn(OUT, IN, dtype=torch.bfloat16), torch.randn(OUT, dtype=torch.bfloat16))


@packs
def test_a_row_has_the_same_bits_in_any_company(doubling: Linear) -> None:
    x, residual = torch.randn(40, IN, dtype=torch.bfloat16), torch.randn(40, OUT, dtype=torch.bfloat16)
    assert doubling.doubles
    whole, added = doubling(x), doubling(x, residual)
    for rows in (1, 2, 3, 4, 5, 8, 17):
        assert torch.equal(doubling(x[:rows]), whole[:rows])
        assert torch.equal(doubling(x[:rows], residual[:rows]), added[:rows])
    assert doubling.bias is not None
    wanted = F.linear(x.double(), doubling.unpacked().double(), doubling.bias.double())
    torch.testing.assert_close(whole.double(), wanted, rtol=0.01, atol=0.05)
    torch.testing.assert_close(added.double(), wanted + residual.double(), rtol=0.01, atol=0.05)


@packs
def test_two_rows_or_more_round_alike_where_the_inner_dimension_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "DOUBLED_BYTES", 0)
    monkeypatch.setattr(ops, "library", lambda: None)
    wide = Linear(torch.randn(128, 4864, dtype=torch.bfloat16))
    x = torch.randn(17, 4864, dtype=torch.bfloat16)
    whole = wide(x)
    for rows in (2, 3, 4, 8):
        assert torch.equal(wide(x[:rows]), whole[:rows])


@packs
def test_rows_with_gaps(doubling: Linear) -> None:
    x, residual = torch.randn(7, 2 * IN, dtype=torch.bfloat16), torch.randn(7, 2 * OUT, dtype=torch.bfloat16)
    assert torch.equal(doubling(x[:, :IN], residual[:, :OUT]), doubling(x[:, :IN].contiguous(), residual[:, :OUT].contiguous()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 3, 64).to(dtype), torch.rand(64).to(dtype)
    x[:, :, 7] *= 1000  # as the residual streams of real models have
    wanted = F.rms_norm(x.double(), (64,), weight.double(), 1e-6)
    got = RMSNorm(weight, 1e-6)(x)
    assert (got.shape, got.dtype) == (x.shape, dtype)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5 if dtype == torch.float32 else 0.01, atol=1e-6)
