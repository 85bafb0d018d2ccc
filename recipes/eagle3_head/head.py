"""The head as it is trained, and the batches it is trained on.

Pairing: row t holds the target's feature f_t with the embedding of token x_{t+1}, sits at rotary position t and predicts x_{t+2}.
Training-time test (EAGLE-3): unroll step i starts from every row, and its input state is the head's own output of step i - 1, not a
feature; what it may attend to is what it will find when drafting: rows with features up to its start, then its own earlier steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from adaptivespec.models.architecture import ModelConfig
from adaptivespec.models.rotary import Rotary, rotate

from .config import HeadConfig
from .store import Answer


@dataclass
class Batch:
    """Answers side by side. Prompts are padded on the left, so that answer position j is the same column in every row.

    Attributes:
        tokens: [B, T + 2] int64, T = prompt columns - 1 + A.
        features: [B, T, 3H].
        hidden: [B, A, H] target states: hidden[:, j] predicts tokens[:, first + j + 2].
        begins: [B] first real column of each row.
        lengths: [B] real entries of `hidden`.
        first: column of the first row that is trained (the last prompt token's).
    """

    tokens: torch.Tensor
    features: torch.Tensor
    hidden: torch.Tensor
    begins: torch.Tensor
    lengths: torch.Tensor
    first: int

    @classmethod
    def collate(cls, answers: list[Answer], device: torch.device | str = "cpu") -> Batch:
        """Pad answers to one width."""
        prompt = max(a.prompt_length for a in answers)
        longest = max(len(a.hidden) for a in answers)
        width = prompt - 1 + longest
        example = answers[0]
        tokens = torch.zeros(len(answers), width + 2, dtype=torch.long)
        features = torch.zeros(len(answers), width, example.features.shape[1], dtype=example.features.dtype)
        hidden = torch.zeros(len(answers), longest, example.hidden.shape[1], dtype=example.hidden.dtype)
        for b, a in enumerate(answers):
            at = prompt - a.prompt_length
            tokens[b, at : at + len(a.tokens)] = a.tokens
            rows = a.features[: width - at]
            features[b, at : at + len(rows)] = rows
            hidden[b, : len(a.hidden)] = a.hidden
        begins = torch.tensor([prompt - a.prompt_length for a in answers])
        lengths = torch.tensor([len(a.hidden) for a in answers])
        tokens, features, hidden, begins, lengths = (x.to(device) for x in (tokens, features, hidden, begins, lengths))
        return cls(tokens, features, hidden, begins, lengths, prompt - 1)

    def labels(self, step: int) -> torch.Tensor:
        """[B, A - step] the token that unroll step `step` (from 0) of each start should predict."""
        return self.tokens[:, self.first + 2 + step :]

    def valid(self, step: int) -> torch.Tensor:
        """bool [B, A - step]: starts whose unroll step `step` is still inside the answer."""
        columns = torch.arange(step, self.hidden.shape[1], device=self.tokens.device)
        return columns[None] < self.lengths[:, None]


class _Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, dim: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(2 * hidden, heads * dim, bias=False)
        self.k_proj = nn.Linear(2 * hidden, kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(2 * hidden, kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(heads * dim, hidden, bias=False)


class _MLP(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)


class _MidLayer(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, dim: int, intermediate: int, eps: float) -> None:
        super().__init__()
        self.self_attn = _Attention(hidden, heads, kv_heads, dim)
        self.mlp = _MLP(hidden, intermediate)
        self.hidden_norm = nn.RMSNorm(hidden, eps)
        self.input_layernorm = nn.RMSNorm(hidden, eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)


class Head(nn.Module):
    """An EAGLE-3 head in fp32 whose parameters carry the public checkpoint's names; it computes in the dtype of the features.

    `feature_scale` divides the features before `fc` and is folded into `fc` at export: layers differ in scale by orders of magnitude.
    """

    feature_scale: torch.Tensor

    def __init__(self, target: ModelConfig, config: HeadConfig) -> None:
        super().__init__()
        size = target.hidden_size
        self.target, self.config = target, config
        self.fc = nn.Linear(3 * size, size, bias=False)
        self.midlayer = _MidLayer(
            size, target.num_heads, target.num_kv_heads, target.head_dim, config.intermediate_size, target.rms_norm_eps
        )
        self.norm = nn.RMSNorm(size, target.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.register_buffer("feature_scale", torch.ones(3 * size))

    @torch.no_grad()
    def initialise(self, features: torch.Tensor, lm_rows: torch.Tensor, norm: torch.Tensor, seed: int) -> None:
        """Start near the target: `fc` passes on the highest layer's features, the output rows are the target's own.

        Args:
            features: [n, 3H] a sample of answer rows, for the scale.
            lm_rows: [draft vocabulary, H] of the target's head.
            norm: [H] weight of the target's final norm.
            seed: of the random rest.
        """
        generator = torch.Generator().manual_seed(seed)
        size = self.target.hidden_size
        sample = features.float()
        self.feature_scale.copy_(sample.std(0).clamp(min=1e-3))
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                small = name.endswith(("o_proj.weight", "down_proj.weight"))
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.01 if small else 0.02))
            else:
                parameter.fill_(1.0)
        rms = sample[:, 2 * size :].square().mean(-1).sqrt().median()
        self.fc.weight.mul_(0.2 * 50 / (3 * size) ** 0.5)
        self.fc.weight[:, 2 * size :] += torch.diag(self.feature_scale[2 * size :] / rms)
        self.lm_head.weight.copy_(lm_rows)
        self.norm.weight.copy_(norm * 0.5)  # soft logits: the layer below is not the target's last yet

    def cast(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The parameters in the compute dtype, cast once per step and not once per use."""
        return {name: parameter.to(dtype) for name, parameter in self.named_parameters()}

    def unroll(
        self,
        weights: dict[str, torch.Tensor],
        batch: Batch,
        embedding: torch.Tensor,
        rotary: Rotary,
        steps: int,
        noise: torch.Tensor | None = None,
    ) -> Iterator[torch.Tensor]:
        """Draft from every row of the batch along its own tokens.

        Args:
            weights: from `cast`.
            batch: what to draft on.
            embedding: [V, H], the target's.
            rotary: the target's tables.
            steps: how many unroll steps.
            noise: [B, T, 3H] added to the scaled features.

        Yields:
            For step i the normed states [B, A - i, H]; the logits are these times lm_head.
        """
        w, c = weights, self.target
        dtype = embedding.dtype
        heads, kv, dim, eps, size = c.num_heads, c.num_kv_heads, c.head_dim, c.rms_norm_eps, (c.hidden_size,)
        group = heads // kv
        count, width = batch.features.shape[:2]
        starts = width - batch.first  # A
        layer, attention = "midlayer.", "midlayer.self_attn."
        scaled = batch.features / self.feature_scale.to(dtype)
        state = F.linear(scaled if noise is None else scaled + noise, w["fc.weight"])
        columns = torch.arange(width, device=state.device)
        rows = batch.first + torch.arange(starts, device=state.device)
        seen = (columns[None, None] <= rows[None, :, None]) & (columns[None, None] >= batch.begins[:, None, None])
        bias = torch.zeros(seen.shape, dtype=dtype, device=state.device).masked_fill_(~seen, float("-inf"))[:, None, None]
        rotary.grow(width + steps)

        keys = values = torch.empty(0)  # of rows with features, [B, kv, T, dim]
        own_keys: list[torch.Tensor] = []  # of earlier steps, [B, kv, 1, A - i, dim]
        own_values: list[torch.Tensor] = []
        for i in range(steps):
            length = starts - i
            if length <= 0:
                return
            if i == 0:
                tokens, positions = batch.tokens[:, 1 : width + 1], columns
            else:
                at = batch.first + 1 + i
                tokens, positions = batch.tokens[:, at : at + length], rows[:length] + i
                state = state[:, :length]
            embed = F.rms_norm(embedding[tokens], size, w[layer + "input_layernorm.weight"], eps)
            x = torch.cat([embed, F.rms_norm(state, size, w[layer + "hidden_norm.weight"], eps)], -1)
            angles = rotary.angles(positions)
            k = rotate(F.linear(x, w[attention + "k_proj.weight"]).view(count, -1, kv, dim), angles).transpose(1, 2)
            v = F.linear(x, w[attention + "v_proj.weight"]).view(count, -1, kv, dim).transpose(1, 2)
            if i == 0:
                keys, values = k, v
                x, state, angles = x[:, batch.first :], state[:, batch.first :], rotary.angles(rows)
            else:
                own_keys.append(k[:, :, None])
                own_values.append(v[:, :, None])
            q = rotate(F.linear(x, w[attention + "q_proj.weight"]).view(count, length, heads, dim), angles) * dim**-0.5
            q = q.view(count, length, kv, group, dim).permute(0, 2, 3, 1, 4)  # [B, kv, group, A - i, dim]
            folded = q.reshape(count, kv, group * length, dim)
            scores = [torch.matmul(folded, keys.transpose(-1, -2)).view(count, kv, group, length, width) + bias[:, :, :, :length]]
            scores += [(q * own[:, :, :, :length]).sum(-1, keepdim=True) for own in own_keys]
            share = torch.softmax(torch.cat(scores, -1) if i else scores[0], -1)
            mixed = torch.matmul(share[..., :width].reshape(count, kv, group * length, width), values)
            mixed = mixed.view(count, kv, group, length, dim)
            for j, own in enumerate(own_values):
                mixed = mixed + share[..., width + j : width + j + 1] * own[:, :, :, :length]
            mixed = mixed.permute(0, 3, 1, 2, 4).reshape(count, length, heads * dim)
            state = state + F.linear(mixed, w[attention + "o_proj.weight"])
            y = F.rms_norm(state, size, w[layer + "post_attention_layernorm.weight"], eps)
            gated = F.silu(F.linear(y, w[layer + "mlp.gate_proj.weight"])) * F.linear(y, w[layer + "mlp.up_proj.weight"])
            state = state + F.linear(gated, w[layer + "mlp.down_proj.weight"])
            yield F.rms_norm(state, size, w["norm.weight"], eps)


class _SoftCrossEntropy(torch.autograd.Function):
    """The output layer and its cross-entropy with soft targets, in chunks of rows that stay in the cache.

    fp32 logits of a whole batch, their softmax and its gradient are by far the largest tensors of training; on a CPU they cost more time
    in memory and page faults than in arithmetic. So the gradients are made in the forward pass, while a chunk's logits are there.
    """

    @staticmethod
    def forward(ctx, states, weight, targets, rows, scale):  # type: ignore[no-untyped-def]
        grad = torch.empty(len(states), len(weight), dtype=weight.dtype, device=weight.device)
        total = states.new_zeros((), dtype=torch.float32)
        for i in range(0, len(states), 128):
            logits, target = (states[i : i + 128] @ weight.T).float(), targets[rows[i : i + 128]].float()
            z = torch.logsumexp(logits, -1)
            total += (z - torch.linalg.vecdot(target, logits)).sum()
            grad[i : i + 128] = logits.sub_(z[:, None]).exp_().sub_(target).mul_(scale)
        ctx.save_for_backward(grad @ weight, grad.T @ states)
        return total * scale

    @staticmethod
    def backward(ctx, grad_output):  # type: ignore[no-untyped-def]
        grad_states, grad_weight = ctx.saved_tensors
        if grad_output != 1:
            grad_states, grad_weight = grad_states * grad_output, grad_weight * grad_output
        return grad_states, grad_weight, None, None, None


def soft_cross_entropy(states: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, rows: torch.Tensor, scale: float) -> torch.Tensor:
    """Cross-entropy of an output layer with soft targets.

    Args:
        states: [n, H] inputs of the output layer.
        weight: [K, H] of the output layer, in the dtype to compute in.
        targets: [m, K] distributions.
        rows: [n] which target row belongs to each state.
        scale: factor on the sum over rows.

    Returns:
        A scalar in fp32.
    """
    return _SoftCrossEntropy.apply(states, weight, targets, rows, scale)  # type: ignore[no-any-return, no-untyped-call]
