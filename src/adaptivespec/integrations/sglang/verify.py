"""The acceptance rule inside SGLang's verify step: the target's prediction is rewritten so that the stock kernel walks the rule's path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...method.acceptance import Acceptance, VerifyInputs
from ...method.grouped import accept_by_rule
from ...method.noise import uniform
from ...method.tree import DraftTree
from .requests import RequestBatch
from .sampling import scores


@dataclass(frozen=True)
class Decision:
    """What the rules decided for a batch.

    Attributes:
        tree: the draft trees.
        acceptance: the accepted paths.
        target_predict: [B, N]: after each node the token that the stock kernel must look for among its children, and emit.
    """

    tree: DraftTree
    acceptance: Acceptance
    target_predict: torch.Tensor


def decide(
    batch: RequestBatch,
    protected: torch.Tensor,
    *,
    logits: torch.Tensor,
    target_predict: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    seq_lens: torch.Tensor,
    levels: int,
) -> Decision:
    """Let every request's rule choose its path; no host read.

    Args:
        batch: the requests.
        protected: bool [B or 1, V], tokens that guards protect.
        logits: [B * N, V] after penalties, bias and grammar masks, one row per node.
        target_predict: [B, N], the argmax of logits.
        candidates: [B, N], the trees' tokens, the last committed token first.
        retrieve_next_token, retrieve_next_sibling: [B, N], first child and next sibling of each node, -1 for none.
        seq_lens: [B], committed rows of the KV cache: the root's position.
        levels: the deepest level of any tree.
    """
    tokens = candidates.to(torch.int64)
    nothing = torch.zeros_like(tokens, dtype=torch.float32)  # rules do not read the drafter's probabilities
    tree = DraftTree.from_sglang(tokens, retrieve_next_token.to(torch.int64), retrieve_next_sibling.to(torch.int64), nothing, levels)
    inputs = _verify_inputs(batch, tree, logits, target_predict, seq_lens)
    acceptance = accept_by_rule(batch.by_rule, tree, inputs, batch.params(protected, seq_lens))
    return Decision(tree, acceptance, _steered(tree, acceptance, inputs.choice).to(target_predict.dtype))


def agreed(decision: Decision, from_first_rank: Callable[[torch.Tensor], torch.Tensor]) -> Decision:
    """The first rank's decision on every rank, in one message: sampled choices come from sums whose rounding may differ between ranks."""
    acceptance = decision.acceptance
    parts = (
        acceptance.path,
        acceptance.num_accepted[:, None],
        acceptance.bonus[:, None],
        acceptance.promoted,
        acceptance.log_margin,
        decision.target_predict,
    )
    widths = [part.shape[1] for part in parts]
    sent = from_first_rank(torch.cat([part.double() for part in parts], 1))  # a double holds all of them exactly
    path, count, bonus, promoted, margin, predict = (x.to(part.dtype) for x, part in zip(torch.split(sent, widths, 1), parts, strict=True))
    acceptance = Acceptance(path, count[:, 0], bonus[:, 0], promoted, margin)
    return Decision(decision.tree, acceptance, predict.contiguous())


def _verify_inputs(
    batch: RequestBatch, tree: DraftTree, logits: torch.Tensor, target_predict: torch.Tensor, seq_lens: torch.Tensor
) -> VerifyInputs:
    requests, nodes = tree.tokens.shape
    rows = torch.arange(requests * nodes, device=logits.device).view(requests, nodes)
    sampling = batch.sampling
    if not sampling.samples:  # SGLang has taken the argmax already
        choice = target_predict.to(torch.int64)
        return VerifyInputs(logits, logits, rows, choice, logits.gather(1, choice.view(-1, 1)).view_as(choice), sampling.temperature)
    # A node at position p chooses the token of position p + 1.
    positions = seq_lens.to(torch.int64)[:, None] + tree.depth + 1
    filtered, noisy = scores(logits, sampling.repeat(nodes), positions.view(-1))
    inputs = VerifyInputs.from_rows(filtered, noisy, rows, sampling.temperature)
    if not any(rule.tosses_coins for rule in batch.by_rule):
        return inputs
    coins = uniform(sampling.seeds[:, None], positions)
    return VerifyInputs(filtered, noisy, rows, inputs.choice, inputs.top, sampling.temperature, coins)


def _steered(tree: DraftTree, acceptance: Acceptance, choice: torch.Tensor) -> torch.Tensor:
    """`choice` [B, N] with the accepted path written in: each node on it predicts its accepted child, the last one the bonus.

    The stock kernel follows a child whose token is predicted, so it walks this path and no other: at the last node no child has the
    bonus' token, or the rule would have gone on.
    """
    nodes = choice.shape[1]
    path = torch.nn.functional.pad(acceptance.path, (0, 1), value=-1)
    at = torch.nn.functional.pad(acceptance.path, (1, 0)).clamp(min=0)
    step = torch.arange(path.shape[1], device=choice.device)
    accepted = acceptance.num_accepted[:, None]
    token = torch.where(step < accepted, tree.tokens.gather(1, path.clamp(min=0)), acceptance.bonus[:, None])
    # One extra column swallows what lies beyond the path.
    wide = torch.cat([choice, choice[:, :1]], 1)
    return wide.scatter(1, torch.where(step <= accepted, at, nodes), token)[:, :nodes].contiguous()  # the kernel reads it as it lies


def spent_after(spent: torch.Tensor, acceptance: Acceptance) -> torch.Tensor:
    """float64 [B]: nats spent after a step, added up along the path in the order in which the rule held them against the budget."""
    for margin in acceptance.log_margin.unbind(1):
        spent = spent - margin
    return spent
