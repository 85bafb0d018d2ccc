"""Tensors of a GGUF file under their Hugging Face names, dequantised chunk by chunk into the wanted dtype."""

from __future__ import annotations

import re
from io import FileIO

import torch

from ..errors import UserError
from .gguf_file import GGUFFile, GGUFTensor
from .raw_read import CHUNK_ELEMENTS, read_bytes

_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BIASED = {"attn_q", "attn_k", "attn_v"}  # the only biases these families have
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_PERMUTED = re.compile(r".*self_attn\.[qk]_proj\.(weight|bias)")
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
ROPE_FACTORS = "rope_freqs.weight"  # not a weight: gguf_config reads it


class GGUFWeights:
    """The `Weights` of a GGUF file (a path, or an opened file) of a llama, qwen2 or qwen3 decoder.

    Raises UserError for a tensor these families do not have or whose quantisation cannot be read, before anything is loaded.
    """

    def __init__(self, source: str | GGUFFile) -> None:
        self.file = source if isinstance(source, GGUFFile) else GGUFFile(source)
        self._permuted = self.file.get("general.architecture") == "llama"
        self._head_dim = head_dim(self.file) if self._permuted else 0
        self._tensors = {hf_name(self.file, name): tensor for name, tensor in self.file.tensors.items() if name != ROPE_FACTORS}
        for kind in {tensor.type_name for tensor in self._tensors.values()}:
            self._check_readable(kind)

    def names(self) -> frozenset[str]:
        """All tensor names, as Hugging Face spells them."""
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor."""
        return self._tensor(name).shape

    def load(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """One tensor, dequantised, in a tensor of its own. Transient memory stays near 32 MB."""
        tensor = self._tensor(name)
        out = torch.empty(tensor.shape, dtype=dtype)
        rows = self._row_order(tensor) if self._permuted and _PERMUTED.fullmatch(name) else None
        try:
            with self.file.path.open("rb", buffering=0) as file:
                _read(file, tensor, out, rows)
        except (OSError, EOFError) as error:
            raise UserError(f"cannot read tensor {tensor.name} from {self.file.path}: {error}") from None
        return out

    def _tensor(self, name: str) -> GGUFTensor:
        if name not in self._tensors:
            raise UserError(f"tensor {name} is missing from {self.file.path}")
        return self._tensors[name]

    def _row_order(self, tensor: GGUFTensor) -> torch.Tensor:
        """[rows] Hugging Face row of each stored row: llama.cpp interleaves the two rotary halves of every llama head."""
        order = torch.arange(tensor.shape[0]).view(-1, 2, self._head_dim // 2)  # [heads, half, i]: the row in Hugging Face's order
        return order.transpose(1, 2).reshape(-1)

    def _check_readable(self, kind: str) -> None:
        import numpy
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        try:
            if kind not in _PLAIN:
                dequantize(numpy.zeros((1, GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]), dtype=numpy.uint8), GGMLQuantizationType[kind])
        except NotImplementedError:
            name = next(tensor.name for tensor in self._tensors.values() if tensor.type_name == kind)
            raise UserError(f"tensor {name} in {self.file.path} is stored as {kind}, which cannot be dequantised here") from None


def hf_name(file: GGUFFile, name: str) -> str:
    """Hugging Face's name of a llama.cpp tensor. Raises UserError for one that these families do not have."""
    if name in _GLOBAL:
        return _GLOBAL[name]
    match = _BLOCK.fullmatch(name)
    if match and match[2] in _LAYER and (match[3] == "weight" or match[2] in _BIASED):
        return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{match[3]}"
    raise UserError(f"{file.path} has the tensor {name}, which no supported architecture (llama, qwen2, qwen3) has")


def head_dim(file: GGUFFile) -> int:
    """Width of one attention head. Raises UserError when query and value heads differ or the metadata is incomplete."""
    prefix = file.require("general.architecture")
    heads, hidden = file.count(f"{prefix}.attention.head_count"), file.count(f"{prefix}.embedding_length")
    width = file.count(f"{prefix}.attention.key_length", hidden // heads)
    if file.count(f"{prefix}.attention.value_length", width) != width:
        raise UserError(f"{file.path}: key heads and value heads of different width are not supported")
    return width


def _read(file: FileIO, tensor: GGUFTensor, out: torch.Tensor, rows: torch.Tensor | None) -> None:
    """Read and dequantise row chunks into `out`; stored row r goes to row `rows[r]`."""
    height = tensor.shape[0] if len(tensor.shape) > 1 or rows is not None else 1
    flat = out.view(height, -1)
    step = max(1, CHUNK_ELEMENTS // max(1, flat.shape[1]))
    row_bytes = tensor.num_bytes // height
    buffer = torch.empty(min(step, height) * row_bytes, dtype=torch.uint8)
    file.seek(tensor.offset)
    for start in range(0, height, step):
        stop = min(start + step, height)
        raw = buffer[: (stop - start) * row_bytes].view(stop - start, row_bytes)
        read_bytes(file, raw.view(-1))
        values = _dequantise(raw, tensor.type_name)
        if rows is None:
            flat[start:stop] = values
        else:
            flat[rows[start:stop]] = values.to(out.dtype)


def _dequantise(raw: torch.Tensor, kind: str) -> torch.Tensor:
    """[rows, row bytes] uint8 to [rows, width] floats."""
    if kind in _PLAIN:
        return raw.view(_PLAIN[kind])
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    return torch.from_numpy(dequantize(raw.numpy(), GGMLQuantizationType[kind]))
