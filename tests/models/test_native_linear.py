"""The compiled linear: right values for every shape, the same bits of a row in any company, and a quiet retreat where it can't be built."""

from __future__ import annotations

import _ctypes
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptivespec.models.linear import Linear
from adaptivespec.models.native import build, ops, pages
from adaptivespec.models.native.build import library

runs = pytest.mark.skipif(library() is None, reason="no AVX512-BF16 without AMX, or no C compiler")


@runs
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 20),
    out=st.integers(1, 200),
    pairs=st.integers(1, 80),
    bias=st.booleans(),
    residual=st.booleans(),
    seed=st.integers(0, 99),
)
def test_values_and_bits(rows: int, out: int, pairs: int, bias: bool, residual: bool, seed: int) -> None:
    noise = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=noise).bfloat16()

    weight, b = draw(out, 2 * pairs), draw(out) if bias else None
    linear = Linear(weight, b)
    assert linear.kernel == "native"
    assert torch.equal(linear.unpacked(), weight)
    # Rows with gaps, as slices of wider tensors have.
    x, r = draw(rows, 2 * pairs + 6)[:, 3 : 3 + 2 * pairs], draw(rows, out + 5)[:, :out] if residual else None
    got = linear(x, r)
    wanted = x.double() @ weight.double().T + (0 if b is None else b.double()) + (0 if r is None else r.double())
    scale = x.double().abs() @ weight.double().abs().T + 4
    assert ((got.double() - wanted).abs() <= 2**-8 * wanted.abs() + 1e-6 * scale).all()  # one rounding to bf16, sums in fp32
    for first in range(rows):
        for last in {first + 1, rows}:
            assert torch.equal(linear(x[first:last], None if r is None else r[first:last]), got[first:last])


@runs
def test_columns_that_are_not_neighbours() -> None:
    linear = Linear(torch.randn(70, 64).bfloat16())
    x, residual = torch.randn(64, 5).bfloat16().T, torch.randn(70, 5).bfloat16().T
    assert torch.equal(linear(x, residual), linear(x.contiguous(), residual.contiguous()))


@runs
def test_threads_change_no_bit() -> None:
    linear, x = Linear(torch.randn(500, 128).bfloat16()), torch.randn(9, 128).bfloat16()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = linear(x)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(linear(x), alone)


@runs
def test_other_shapes_and_types_are_refused() -> None:
    linear = Linear(torch.randn(70, 64).bfloat16())
    x = torch.randn(3, 64).bfloat16()
    for bias in (torch.zeros(70), torch.zeros(69).bfloat16()):
        with pytest.raises(ValueError, match="a bias of"):
            Linear(torch.randn(70, 64).bfloat16(), bias)
    with pytest.raises(ValueError, match="expected a bf16 weight"):
        ops.rms_norm(x, torch.ones(64), 1e-6)
    for wrong in ((x.float(), None), (x[:, :62], None), (x, torch.zeros(3, 64).bfloat16()), (x, torch.zeros(2, 70).bfloat16())):
        with pytest.raises(ValueError, match="expected bf16"):
            linear(*wrong)


def test_what_does_not_fit_is_left_to_torch() -> None:
    assert not ops.fits(torch.zeros(4, 6))
    assert not ops.fits(torch.zeros(4, 5, dtype=torch.bfloat16))
    assert Linear(torch.zeros(4, 6)).kernel == "torch"


REPORT = "from adaptivespec.models.linear import Linear; import torch; print(Linear(torch.ones(64, 64, dtype=torch.bfloat16)).kernel)"


def kernel_in_new_process(cache: Path, **environment: str) -> subprocess.Popen[str]:
    changed = {**os.environ, "XDG_CACHE_HOME": str(cache), **environment}
    return subprocess.Popen([sys.executable, "-c", REPORT], env=changed, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("environment", [{"ADAPTIVESPEC_COMPILE": "0"}, {"CC": "no-such-compiler"}, {"CC": "false"}, {"CC": "true"}])
def test_without_a_compiler_the_linear_is_another(tmp_path: Path, environment: dict[str, str]) -> None:
    out, err = kernel_in_new_process(tmp_path, **environment).communicate(timeout=120)
    assert out.strip() in ("onednn", "torch")
    assert not err


@runs
def test_a_compiler_with_arguments(tmp_path: Path) -> None:
    assert kernel_in_new_process(tmp_path, CC="cc -pthread").communicate(timeout=120)[0].strip() == "native"


@runs
def test_a_cache_that_cannot_be_written_or_holds_rubbish(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert kernel_in_new_process(tmp_path).communicate(timeout=120)[0].strip() == "native"
    [built] = (tmp_path / "adaptivespec" / "kernels").iterdir()
    assert kernel_in_new_process(tmp_path, PATH="/nowhere").communicate(timeout=120)[0].strip() == "native"
    shutil.copy(_ctypes.__file__, built)  # a library, and none of ours
    assert kernel_in_new_process(tmp_path).communicate(timeout=120)[0].strip() in ("onednn", "torch")
    built.write_bytes(b"rubbish")
    for cache in (blocked, tmp_path):
        out, err = kernel_in_new_process(cache).communicate(timeout=120)
        assert out.strip() in ("onednn", "torch")
        assert not err


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(build, "user_cache", homeless)
    assert build.library.__wrapped__() is None


def test_models_loaded_by_several_threads_share_no_byte() -> None:
    weights, barrier = pages.Pages(), threading.Barrier(4)

    def take(number: int) -> list[tuple[torch.Tensor, int]]:
        barrier.wait()
        return [(weights.empty((1 + i % 37,), torch.bfloat16).fill_(number), number) for i in range(3000)]

    interval = sys.getswitchinterval()
    try:
        sys.setswitchinterval(1e-6)
        with ThreadPoolExecutor(4) as pool:
            taken = [pair for own in pool.map(take, range(4)) for pair in own]
    finally:
        sys.setswitchinterval(interval)
    assert all((tensor == number).all() for tensor, number in taken)


@runs
def test_processes_that_compile_at_the_same_time(tmp_path: Path) -> None:
    processes = [kernel_in_new_process(tmp_path) for _ in range(3)]
    assert [process.communicate(timeout=120)[0].strip() for process in processes] == ["native"] * 3
    assert len(list((tmp_path / "adaptivespec" / "kernels").iterdir())) == 1
