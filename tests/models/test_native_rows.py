"""The compiled norm, gate, rotation and attention: right values, and the same bits of a row whatever stands beside it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptivespec.models.architecture import ModelConfig
from adaptivespec.models.decoder import MLP, Attention, Decoder
from adaptivespec.models.kv_cache import Block, KVCache
from adaptivespec.models.loading import load_model
from adaptivespec.models.native import ops
from adaptivespec.models.native.build import library
from adaptivespec.models.native.layers import NativeView
from tiny_models import VOCAB, make_tiny_model

pytestmark = pytest.mark.skipif(library() is None, reason="no AVX512-BF16 without AMX, or no C compiler")
CPU = torch.device("cpu")


def once_rounded(got: torch.Tensor, wanted: torch.Tensor, slack: float = 1e-5) -> None:
    """`got` in bf16 is `wanted` in fp64 up to one rounding, and fp32's errors of the size `slack`."""
    assert ((got.double() - wanted).abs() <= 2**-8 * wanted.abs() + slack).all()


@given(rows=st.integers(1, 40), width=st.integers(1, 700), gap=st.integers(0, 3), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_norm(rows: int, width: int, gap: int, seed: int) -> None:
    noise = torch.Generator().manual_seed(seed)
    x = (3 * torch.randn(rows, width + gap, generator=noise)).bfloat16()[:, :width]
    x[:, 0] *= 1000  # as the residual streams of real models have
    weight = torch.rand(width, generator=noise).bfloat16()
    got = ops.rms_norm(x, weight, 1e-6)
    once_rounded(got, F.rms_norm(x.double(), (width,), weight.double(), 1e-6))
    for row in range(rows):
        assert torch.equal(ops.rms_norm(x[row : row + 1], weight, 1e-6)[0], got[row])


def gate(gates: torch.Tensor, ups: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up [M, I] by an MLP whose linears do nothing."""
    width = gates.shape[1]
    first, second = torch.eye(2 * width).chunk(2)
    weights = Tensors({"gate_proj": first, "up_proj": second, "down_proj": torch.eye(2 * width, width)})
    mlp = MLP(weights, "", torch.bfloat16, CPU)  # type: ignore[arg-type]
    assert mlp.native is not None
    x = torch.cat([gates, ups], 1)
    return mlp(x, torch.zeros_like(x))[:, :width]


class Tensors:
    """Weights by the last part of their names, as the layers load them."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def load(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """One tensor."""
        return self.tensors[name.removesuffix(".weight").split(".")[-1]].to(dtype)


@given(rows=st.integers(1, 40), width=st.integers(1, 100), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_gate(rows: int, width: int, seed: int) -> None:
    noise = torch.Generator().manual_seed(seed)
    gates, ups = (8 * torch.randn(2, rows, 2 * width, generator=noise)).bfloat16()
    got = gate(gates, ups)
    once_rounded(got, F.silu(gates.double()) * ups.double())
    for row in range(rows):
        assert torch.equal(gate(gates[row : row + 1], ups[row : row + 1])[0], got[row])


def test_gates_at_the_ends_of_the_range() -> None:
    gates = torch.tensor([[-3e38, -200.0, -90.0, -0.0, 90.0, 3e38]]).bfloat16()
    got = gate(gates, torch.ones_like(gates))[0]
    assert got[3] == 0
    assert torch.equal(got[4:], gates[0, 4:])
    assert got[:3].abs().max() < 1e-30
    assert gate(torch.full((1, 2), math.nan).bfloat16(), torch.ones(1, 2).bfloat16()).isnan().all()


@st.composite
def blocks(draw: st.DrawFn) -> tuple[Block, int, int, int, int]:
    """A ragged block with random masks, and key heads, heads per key head, head width and cache rows."""
    batch, most, length = draw(st.integers(1, 4)), draw(st.integers(1, 24)), draw(st.sampled_from([40, 90, 200]))
    behind = draw(st.integers(0, 5))  # rows of earlier levels between the base and the new rows
    counts = [draw(st.integers(1, most)) for _ in range(batch)]
    bases = [draw(st.integers(0, length - most - behind)) for _ in range(batch)]
    starts = [base + behind for base in bases]
    noise = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    visible = torch.rand(batch, max(counts), max(counts) + behind, generator=noise) < draw(st.sampled_from([0.1, 0.6, 1.0]))
    row, column = torch.arange(max(counts))[:, None], torch.arange(max(counts) + behind)
    visible = (visible & (column < row + behind)) | (column == row + behind)
    slots = draw(st.permutations(range(batch + 2)))[:batch]
    kv_heads, group, dim = draw(st.integers(1, 3)), draw(st.integers(1, 9)), draw(st.sampled_from([32, 64, 128]))
    return Block(slots, bases, starts, counts, visible), kv_heads, group, dim, length


def attend(cache: KVCache, block: Block, qkv: torch.Tensor, angles: torch.Tensor, norms: tuple[torch.Tensor, ...] | None) -> torch.Tensor:
    """Layer 1's attention over the cache, [M, heads * dim], by a module whose linears do nothing."""
    rows, parts, dim = qkv.shape
    heads = parts - 2 * cache.num_kv_heads
    config = ModelConfig("llama", 8, 8, 8, 2, heads, cache.num_kv_heads, dim, 1e-6, 1e4, 64, True, qk_norm=norms is not None)
    wide = torch.eye(parts * dim)
    q, k, v = wide.split([heads * dim, cache.num_kv_heads * dim, cache.num_kv_heads * dim])
    tensors = {"q_proj": q, "k_proj": k, "v_proj": v, "o_proj": torch.eye(heads * dim)}
    if norms is not None:
        tensors |= {"q_norm": norms[0], "k_norm": norms[1]}
    module = Attention(config, Tensors(tensors), "", torch.bfloat16, CPU)  # type: ignore[arg-type]
    view = cache.view(block, angles.unbind(1))  # type: ignore[arg-type]
    return module(qkv.flatten(1), torch.zeros(rows, heads * dim).bfloat16(), view, 1)


@given(drawn=blocks(), normed=st.booleans(), seed=st.integers(0, 99))
@settings(max_examples=80, deadline=None)
def test_attention_against_brute_force(drawn: tuple[Block, int, int, int, int], normed: bool, seed: int) -> None:
    block, kv_heads, group, dim, length = drawn
    noise = torch.Generator().manual_seed(seed)
    heads, rows = kv_heads * group, sum(block.counts)
    cache = KVCache(2, max(block.slots) + 1, kv_heads, length, dim, torch.bfloat16, CPU, native_group=group)
    cache.data.copy_(torch.randn(cache.data.shape, generator=noise))
    before = cache.data.clone()
    qkv = torch.randn(rows, heads + 2 * kv_heads, dim, generator=noise).bfloat16()
    turned = torch.rand(rows, dim // 2, generator=noise)
    angles = torch.stack([turned.cos().repeat(1, 2), torch.cat([-turned.sin(), turned.sin()], 1)], 1)[:, :, None].bfloat16()
    norms = tuple(torch.rand(dim, generator=noise).bfloat16() for _ in range(2)) if normed else None
    out = attend(cache, block, qkv, angles, norms)

    q, k, _ = qkv.double().split([heads, kv_heads, kv_heads], 1)
    if norms is not None:
        q, k = (F.rms_norm(x, (dim,), n.double(), 1e-6).bfloat16().double() for x, n in zip((q, k), norms, strict=True))
    cos, sin = angles.double().unbind(1)
    q, k = (x * cos + x.roll(dim // 2, -1) * sin for x in (q, k))
    assert torch.equal(cache.data[0], before[0])
    first = 0
    for b, (slot, base, start, count) in enumerate(zip(block.slots, block.bases, block.starts, block.counts, strict=True)):
        mine = slice(first, first + count)
        written, kept = cache.data[1, slot], before[1, slot].clone()
        # What was rounded on the way may have gone the other way where fp32 and fp64 part: a little more than one rounding.
        once_rounded(written[:kv_heads, start : start + count], k[mine].transpose(0, 1), slack=0.02 if normed else 1e-5)
        assert torch.equal(written[kv_heads:, start : start + count], qkv[mine, heads + kv_heads :].transpose(0, 1))
        kept[:, start : start + count] = written[:, start : start + count]
        assert torch.equal(written, kept)
        assert block.visible is not None
        for i in range(count):
            seen = [*range(base), *(base + block.visible[b, i].nonzero()[:, 0]).tolist()]
            for h in range(heads):
                keys, values = written[h // group, seen].double(), written[kv_heads + h // group, seen].double()
                weights = torch.softmax(keys @ q[first + i, h].bfloat16().double() * dim**-0.5, 0)
                once_rounded(out[first + i].view(heads, dim)[h], weights @ values, slack=0.02)
        first += count


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Parents and tokens of a tree in index order."""
    size = draw(st.integers(2, 20))
    parents = [-1, *(draw(st.integers(max(0, i - 6), i - 1)) for i in range(1, size))]
    return parents, [draw(st.integers(2, VOCAB - 1)) for _ in range(size)]


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A tiny target of each family in bf16, with heads that the kernels take."""
    overrides = {} if request.param == "qwen3" else {"hidden_size": 128}
    return load_model(make_tiny_model(request.param, tmp_path_factory.mktemp(request.param), **overrides), "bf16").decoder


@given(data=st.data())
@settings(max_examples=15, deadline=None)
@torch.inference_mode()
def test_a_verified_row_is_a_decoded_row(decoder: Decoder, data: st.DataObject) -> None:
    """Random trees behind random prompts, verified in a batch: every node has the bits that decoding its path token by token gives."""
    requests = data.draw(st.lists(st.tuples(st.integers(1, 70), trees()), min_size=1, max_size=3))
    noise = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    cache = decoder.new_cache(len(requests), 100)
    assert cache.native_group
    prompts = [torch.randint(2, VOCAB, (n,), generator=noise) for n, _ in requests]

    def prefill(into: KVCache, slot: int, prompt: torch.Tensor) -> None:
        causal = torch.ones(1, len(prompt), len(prompt), dtype=torch.bool).tril()
        decoder.forward(prompt, torch.arange(len(prompt)), into, Block([slot], [0], [0], [len(prompt)], causal))

    for slot, prompt in enumerate(prompts):
        prefill(cache, slot, prompt)
    sizes = [len(parents) for _, (parents, _) in requests]
    depths: list[list[int]] = []
    visible = torch.zeros(len(requests), max(sizes), max(sizes), dtype=torch.bool)
    for b, (_, (parents, _)) in enumerate(requests):
        depth: list[int] = []
        for i, parent in enumerate(parents):
            depth.append(0 if parent < 0 else depth[parent] + 1)
            if parent >= 0:
                visible[b, i] = visible[b, parent]
            visible[b, i, i] = True
        depths.append(depth)
    tokens = torch.tensor([token for _, (_, own) in requests for token in own])
    starts = [len(prompt) for prompt in prompts]
    positions = torch.tensor([start + d for start, depth in zip(starts, depths, strict=True) for d in depth])
    block = Block(list(range(len(requests))), starts, starts, sizes, visible)
    verified, features = decoder.forward(tokens, positions, cache, block, (1, 2, 4))
    logits = decoder.logits(verified)
    assert features is not None

    first = 0
    for (_, (parents, own)), prompt in zip(requests, prompts, strict=True):
        node = len(parents) - 1
        path: list[int] = []
        while node >= 0:
            path.insert(0, node)
            node = parents[node]
        alone = decoder.new_cache(1, 100)
        prefill(alone, 0, prompt)
        for step, node in enumerate(path):
            at = len(prompt) + step
            block = Block([0], [at], [at], [1], None)
            hidden, wanted = decoder.forward(torch.tensor([own[node]]), torch.tensor([at]), alone, block, (1, 2, 4))
            assert wanted is not None
            assert torch.equal(hidden[0], verified[first + node])
            assert torch.equal(wanted[0], features[first + node])
            assert torch.equal(decoder.logits(hidden)[0], logits[first + node])
        first += len(parents)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    decoder = load_model(make_tiny_model("llama", tmp_path, hidden_size=128), "bf16").decoder
    cache = decoder.new_cache(2, 16)
    dim, hidden, layer = decoder.config.head_dim, decoder.config.hidden_size, decoder.layers[0].attention
    assert layer.native is not None

    def angles(rows: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(rows, 1, dim, dtype=dtype), torch.zeros(rows, 1, dim, dtype=dtype)

    for block in (Block([2], [0], [0], [1], None), Block([0], [0], [16], [1], None), Block([0], [3], [2], [1], None)):
        with pytest.raises(ValueError, match="leave a cache of 2 slots of 16 rows"):
            NativeView(cache, block, angles(1))
    with pytest.raises(ValueError, match="a mask of"):
        NativeView(cache, Block([0], [0], [0], [3], torch.ones(1, 2, 3, dtype=torch.bool)), angles(3))
    block = Block([0], [0], [0], [2], torch.ones(1, 2, 2, dtype=torch.bool).tril())
    for wrong in (angles(1), angles(2, torch.float32)):
        with pytest.raises(ValueError, match="expected angles"):
            NativeView(cache, block, wrong)
    view, x = NativeView(cache, block, angles(2)), torch.zeros(2, hidden).bfloat16()
    for first, second in ((x[:1], x), (x, x[:1]), (x.float(), x), (x[:, 2:], x)):
        with pytest.raises(ValueError, match="expected bf16"):
            view.attention(0, layer.native, first, second)
    with pytest.raises(ValueError, match="layer 6 of 6"):
        view.attention(6, layer.native, x, x)
    assert decoder.native is not None
    with pytest.raises(ValueError, match="features of layers"):
        view.run(decoder.native, x, [6])
    with pytest.raises(ValueError, match="is not one that the kernels can work on"):
        NativeView(KVCache(1, 1, 1, 16, 32, torch.float32, CPU, native_group=1), Block([0], [0], [0], [1], None), angles(1))
    other = KVCache(6, 1, 1, 16, dim, torch.bfloat16, CPU, native_group=2)
    with pytest.raises(ValueError, match="is not this model's"):
        NativeView(other, block, angles(2)).attention(0, layer.native, x, x)
    with pytest.raises(ValueError, match="contiguous"):
        view.run(decoder.native, x[:1].expand(2, hidden), [])
    with pytest.raises(ValueError, match="contiguous"):
        view.run(decoder.native, torch.zeros(2, 2 * hidden).bfloat16()[:, :hidden], [])


@pytest.mark.parametrize("overrides", [{"hidden_size": 64}, {"hidden_size": 128, "intermediate_size": 129}])
def test_heads_and_widths_that_the_kernels_cannot_take(tmp_path: Path, overrides: dict[str, int]) -> None:
    decoder = load_model(make_tiny_model("llama", tmp_path, **overrides), "bf16").decoder
    cache = decoder.new_cache(1, 16)
    assert not cache.native_group
    out, _ = decoder.forward(torch.tensor([5]), torch.tensor([0]), cache, Block([0], [0], [0], [1], None))
    assert out.isfinite().all()


def test_a_block_without_rows(tmp_path: Path) -> None:
    decoder = load_model(make_tiny_model("llama", tmp_path, hidden_size=384, num_attention_heads=12, num_key_value_heads=1), "bf16").decoder
    none = torch.zeros(0, dtype=torch.int64)
    assert len(decoder.forward(none, none, decoder.new_cache(1, 4), Block([0], [0], [0], [0], None))[0]) == 0


def test_a_broken_key_is_not_hidden(tmp_path: Path) -> None:
    decoder = load_model(make_tiny_model("llama", tmp_path, hidden_size=128), "bf16").decoder
    cache = decoder.new_cache(1, 8)
    cache.data[0, 0, 0, 1, 5] = math.nan
    out, _ = decoder.forward(torch.tensor([5]), torch.tensor([3]), cache, Block([0], [3], [3], [1], None))
    assert out.isnan().any()


def test_without_a_mask_a_row_sees_all_up_to_itself(tmp_path: Path) -> None:
    decoder = load_model(make_tiny_model("llama", tmp_path, hidden_size=128), "bf16").decoder
    masks = []
    for visible in (None, torch.ones(1, 1, 1, dtype=torch.bool)):
        cache = decoder.new_cache(1, 40)
        for i in range(30):
            out = decoder.forward(torch.tensor([i + 2]), torch.tensor([i]), cache, Block([0], [i], [i], [1], visible))[0]
        masks.append(out)
    assert torch.equal(*masks)
