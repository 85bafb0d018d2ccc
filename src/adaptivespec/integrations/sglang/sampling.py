"""What sampling makes of the target's logits: top-k, top-p and min-p, and position-keyed noise, for whole batches, without a host read.

The same law as the local engine's: filters act at the request's temperature in the order top-k, top-p, min-p and leave -inf in the logits
(ties at the edge stay); the choice is the argmax of logits + temperature * noise.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch

from ...method.noise import gumbel


@dataclass(frozen=True)
class SamplingRows:
    """Sampling settings of rows of logits.

    Attributes:
        temperature: fp32 [R]; 0 is greedy, and its rows are left alone.
        seeds: int64 [R].
        top_k: int64 [R]; V or more is off.
        top_p: fp32 [R]; 1 is off.
        min_p: fp32 [R]; 0 is off.
        samples: whether any row has a temperature above 0.
        filters: whether any sampling row filters.
        widest: a bound on top_k when every sampling row has one, None otherwise: only so many logits are sorted.
    """

    temperature: torch.Tensor
    seeds: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    samples: bool
    filters: bool
    widest: int | None

    def repeat(self, times: int) -> SamplingRows:
        """Each row `times` times in a row: one per node of a tree."""

        def wide(column: torch.Tensor) -> torch.Tensor:
            return column[:, None].expand(-1, times).reshape(-1)

        columns = {name: wide(getattr(self, name)) for name in ("temperature", "seeds", "top_k", "top_p", "min_p")}
        return dataclasses.replace(self, **columns)  # type: ignore[arg-type]


def keep_probable(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """fp32 [R, V] logits with -inf for the tokens that top-k, top-p and min-p take away; a new tensor."""
    greedy = (rows.temperature == 0)[:, None]
    z = logits / torch.where(greedy[:, 0], 1.0, rows.temperature)[:, None]
    vocab = z.shape[1]
    best = z.topk(min(rows.widest, vocab), -1).values if rows.widest is not None else z.sort(descending=True).values
    place = torch.arange(best.shape[1], device=z.device)
    within = best.masked_fill(place >= rows.top_k[:, None], -math.inf)
    total = within.logsumexp(-1, keepdim=True) if rows.widest is not None else _mass(z, within, rows.top_k)
    share = (within - total).exp().double().cumsum(-1)
    # A token belongs to the nucleus when what comes before it does not suffice; the best always does.
    before = torch.nn.functional.pad(share[:, :-1], (1, 0))
    kept = (within > -math.inf) & ((before < rows.top_p[:, None]) | (rows.top_p >= 1)[:, None])
    edge = torch.where(kept, within, math.inf).amin(-1, keepdim=True)
    edge = torch.maximum(edge, best[:, :1] + rows.min_p.log()[:, None])
    return logits.masked_fill((z < edge) & ~greedy, -math.inf)


def _mass(z: torch.Tensor, within: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """[R, 1] log-sum-exp of what top-k leaves, from the unsorted row where it leaves all: one order of summation for both."""
    whole = z.logsumexp(-1, keepdim=True)
    return torch.where((top_k >= z.shape[1])[:, None], whole, within.logsumexp(-1, keepdim=True))


def scores(logits: torch.Tensor, rows: SamplingRows, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Filtered logits and scores of rows.

    Args:
        logits: [R, V] after penalties and masks; left as they are.
        rows: settings of each row.
        positions: int64 [R], the absolute position of the token that each row chooses.

    Returns:
        Logits and scores, fp32 [R, V]; both are the given tensor when nothing samples.
    """
    if not rows.samples:
        return logits, logits
    logits = logits.float()
    if rows.filters:
        logits = keep_probable(logits, rows)
    noise = gumbel(rows.seeds, positions, logits.shape[1])
    return logits, torch.addcmul(logits, noise, rows.temperature[:, None])
