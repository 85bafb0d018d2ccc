from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import adaptivespec.method.noise as noise_module
from adaptivespec.method.noise import _hash, _splitmix64, _token_codes, gumbel, uniform
from method.slow_oracles import slow_gumbel, slow_hash, slow_splitmix64, slow_uniform

INT64 = st.integers(-(2**63), 2**63 - 1)
ROWS, VOCAB = 2000, 100


def _noise(seeds: range | int, positions: range | int, vocab_size: int = VOCAB) -> torch.Tensor:
    """Rows for a range of seeds at one position, or the other way round."""
    rows = len(seeds) if isinstance(seeds, range) else len(positions) if isinstance(positions, range) else 1
    as_rows = [torch.tensor(x if isinstance(x, range) else [x] * rows, dtype=torch.int64) for x in (seeds, positions)]
    return gumbel(as_rows[0], as_rows[1], vocab_size)


def _uniform(noise: torch.Tensor) -> torch.Tensor:
    return (-(-noise.double()).exp()).exp()


# --- bit for bit ----------------------------------------------------------------------------------------------------------------


def test_splitmix64_known_answers() -> None:
    """The first outputs of the published generator from seed 1234567 (its state advances by the constant added here)."""
    golden, state = 0x9E3779B97F4A7C15, 1234567
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert [slow_splitmix64((state + i * golden) % 2**64) for i in range(5)] == published
    signed = torch.tensor([((state + i * golden + 2**63) % 2**64) - 2**63 for i in range(5)])
    assert [x % 2**64 for x in _splitmix64(signed).tolist()] == published


@given(st.lists(st.tuples(INT64, st.one_of(st.integers(0, 1 << 20), INT64)), min_size=1, max_size=4), st.integers(1, 40))
@settings(max_examples=60)
def test_gumbel_equals_plain_python(rows: list[tuple[int, int]], vocab_size: int) -> None:
    seeds, positions = (torch.tensor(column) for column in zip(*rows, strict=True))
    hashed = [[slow_hash(seed, position, token) for token in range(vocab_size)] for seed, position in rows]
    assert _hash(seeds, positions, vocab_size).tolist() == hashed
    noise = gumbel(seeds, positions, vocab_size)
    assert noise.shape == (len(rows), vocab_size)
    assert noise.dtype == torch.float32
    wanted = [[slow_gumbel(seed, position, token) for token in range(vocab_size)] for seed, position in rows]
    torch.testing.assert_close(noise.double(), torch.tensor(wanted, dtype=torch.float64), rtol=2e-7, atol=1e-6)


def test_token_ids_of_large_vocabularies() -> None:
    noise = gumbel(torch.tensor([3]), torch.tensor([9]), 152_000)[0]
    tokens = (0, 1, 65_535, 65_536, 128_255, 151_999)
    assert _hash(torch.tensor([3]), torch.tensor([9]), 152_000)[0, list(tokens)].tolist() == [slow_hash(3, 9, token) for token in tokens]
    for token in tokens:
        assert noise[token].item() == pytest.approx(slow_gumbel(3, 9, token), rel=1e-6, abs=1e-6)
    assert torch.isfinite(noise).all()


def test_extreme_hashes_are_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = [0, 1, 2, 2**24 + 1, 2**30, 2**31 - 2**8, 2**31 - 2, 2**31 - 1]
    monkeypatch.setattr(noise_module, "_hash", lambda *_: torch.tensor([hashed], dtype=torch.int32))
    wanted = [-math.log(-math.log1p(-slow_uniform(h))) for h in hashed]
    assert gumbel(torch.tensor([0]), torch.tensor([0]), len(hashed))[0].tolist() == pytest.approx(wanted, rel=2e-7, abs=1e-6)
    assert wanted[0] == pytest.approx(22.18, abs=0.01)
    assert wanted[-1] == pytest.approx(-2.81, abs=0.01)


def test_range_of_a_large_sample() -> None:
    noise = _noise(range(400), 0, 20_000)
    assert torch.isfinite(noise).all()
    assert -2.9 < noise.min() < -2.5
    assert 13 < noise.max() < 22.2


# --- of seed and position alone -------------------------------------------------------------------------------------------------


def test_depends_on_seed_and_position_alone() -> None:
    seeds, positions = torch.tensor([5, 5, 6, 5]), torch.tensor([8, 9, 8, 8])
    noise = gumbel(seeds, positions, 50)
    assert torch.equal(noise[0], noise[3])
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert (noise[a] == noise[b]).float().mean() < 0.1
    for row in range(4):
        assert torch.equal(gumbel(seeds[row : row + 1], positions[row : row + 1], 50)[0], noise[row])
    assert torch.equal(gumbel(seeds, positions, 20), noise[:, :20])
    assert torch.equal(gumbel(seeds.flip(0), positions.flip(0), 50), noise.flip(0))


def test_seed_and_position_are_not_interchangeable() -> None:
    swapped = gumbel(torch.tensor([8]), torch.tensor([5]), 50)
    assert (gumbel(torch.tensor([5]), torch.tensor([8]), 50) == swapped).float().mean() < 0.1


def test_arguments_and_the_cached_codes_are_left_alone() -> None:
    seeds, positions = torch.tensor([1, 2]), torch.tensor([3, 4])
    codes = _token_codes(30, seeds.device).clone()
    first = gumbel(seeds, positions, 30)
    assert torch.equal(first, gumbel(seeds, positions, 30))
    assert torch.equal(codes, _token_codes(30, seeds.device))
    assert (seeds.tolist(), positions.tolist()) == ([1, 2], [3, 4])


# --- the law --------------------------------------------------------------------------------------------------------------------

SAMPLES = {
    "tokens": lambda: _noise(0, 0, ROWS * VOCAB)[0],
    "positions": lambda: _noise(1, range(ROWS)).flatten(),
    "seeds": lambda: _noise(range(ROWS), 7).flatten(),
}


@pytest.mark.parametrize("across", SAMPLES)
def test_gumbel_law(across: str) -> None:
    noise = SAMPLES[across]().double()
    count = len(noise)
    sigma = math.pi / math.sqrt(6)
    assert abs(noise.mean() - 0.5772156649) < 4 * sigma / math.sqrt(count)
    # the variance of a sample variance: sigma^4 (kurtosis - 1) / n, with the Gumbel law's kurtosis of 5.4
    assert abs(noise.var() - sigma**2) < 4 * sigma**2 * math.sqrt(4.4 / count)
    assert stats.kstest(noise.numpy(), "gumbel_r").pvalue > 1e-3
    counts = torch.histc(_uniform(noise), bins=256, min=0, max=1)
    assert stats.chisquare(counts.numpy()).pvalue > 1e-3


def test_one_token_over_positions() -> None:
    for token in (0, 1, 63):
        noise = _noise(2, range(20_000), 64)[:, token].double()
        assert stats.kstest(noise.numpy(), "gumbel_r").pvalue > 1e-3


def _independent(a: torch.Tensor, b: torch.Tensor) -> None:
    """No linear correlation, and a flat joint histogram."""
    a, b = _uniform(a).flatten(), _uniform(b).flatten()
    correlation = torch.corrcoef(torch.stack([a, b]))[0, 1].item()
    assert abs(correlation) < 4.5 / math.sqrt(len(a))
    cells = (a * 16).long().clamp(max=15) * 16 + (b * 16).long().clamp(max=15)
    assert stats.chisquare(torch.bincount(cells, minlength=256).numpy()).pvalue > 1e-4


@pytest.mark.parametrize("lag", [1, 2, 3, 16, 64])
def test_neighbouring_tokens_are_independent(lag: int) -> None:
    noise = _noise(3, range(ROWS), 128)
    _independent(noise[:, :-lag], noise[:, lag:])


@pytest.mark.parametrize("lag", [1, 2, 5, 256, 2**16, 2**32, 2**62])
def test_neighbouring_positions_are_independent(lag: int) -> None:
    _independent(_noise(4, range(ROWS)), _noise(4, range(lag, lag + ROWS)))


@pytest.mark.parametrize("lag", [1, 2, 5, 256, 2**16, 2**32, 2**62])
def test_neighbouring_seeds_are_independent(lag: int) -> None:
    _independent(_noise(range(ROWS), 11), _noise(range(lag, lag + ROWS), 11))


def test_the_next_seed_is_not_the_next_position() -> None:
    _independent(_noise(20, range(ROWS)), _noise(21, range(1, ROWS + 1)))
    _independent(_noise(20, range(ROWS)), _noise(21, range(ROWS)))


# --- sampling -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize("across", ["positions", "seeds"])
def test_argmax_samples_the_softmax(temperature: float, across: str) -> None:
    logits = torch.tensor([1.0, 0.3, -0.5, 2.0, 1.9, -3.0, 0.0, -math.inf])
    count = 60_000
    noise = _noise(5, range(count), 8) if across == "positions" else _noise(range(count), 123, 8)
    picks = torch.bincount((logits + temperature * noise).argmax(1), minlength=8)
    assert picks[7] == 0
    expected = (logits / temperature).softmax(0).double()[:7]
    assert stats.chisquare(picks[:7].numpy(), (expected / expected.sum() * count).numpy()).pvalue > 1e-3


def test_consecutive_samples_are_independent() -> None:
    logits = torch.tensor([0.5, 0.0, -0.5, 1.0])
    picks = (logits + _noise(6, range(60_001), 4)).argmax(1)
    table = torch.bincount(picks[:-1] * 4 + picks[1:], minlength=16).reshape(4, 4)
    assert stats.chi2_contingency(table.numpy()).pvalue > 1e-3


# --- coins ----------------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(INT64, INT64), min_size=1, max_size=6))
@settings(max_examples=40)
def test_uniform_equals_plain_python(rows: list[tuple[int, int]]) -> None:
    seeds, positions = (torch.tensor(column) for column in zip(*rows, strict=True))
    for coin, (seed, position) in zip(uniform(seeds, positions).tolist(), rows, strict=True):
        there = slow_splitmix64(slow_splitmix64(seed % 2**64) ^ (position % 2**64))
        assert coin == ((slow_splitmix64(slow_splitmix64(there) ^ 0x636F696E) >> 41) + 0.5) / 2**23
        assert 0 < coin < 1


def test_coins_are_uniform_and_independent_of_the_gumbel_noise() -> None:
    seeds, positions = torch.arange(400)[:, None], torch.arange(50)
    coins = uniform(seeds, positions)
    assert coins.shape == (400, 50)
    assert torch.equal(coins[3:5, 7:9], uniform(seeds[3:5], positions[7:9]))
    assert stats.kstest(coins.flatten().numpy(), "uniform").pvalue > 1e-3
    noise = gumbel(seeds.expand(400, 50).flatten(), positions.repeat(400), 3)
    for token in range(3):
        assert stats.spearmanr(coins.flatten().numpy(), noise[:, token].numpy()).pvalue > 1e-3
    for other in (coins[1:], coins[:-1].roll(1, 1)):
        assert stats.spearmanr(coins[: len(other)].flatten().numpy(), other.flatten().numpy()).pvalue > 1e-3
