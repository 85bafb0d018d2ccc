"""Draft trees in SGLang's linked form: made, walked, and what follows from the walk.

A draft proposes candidates in rows of topk. Row 0 are the root's children; row r > 0 are the children of candidate `parent_list[r]`.
`selected_index` are the candidates that the tree keeps, ascending; node i + 1 of the tree is the i-th of them, node 0 the root.
"""

from __future__ import annotations

import torch

QLEN_ONLY = 1  # a mask of draft tokens only: what SGLang builds for a CPU


def build_tree_kernel_efficient_cpu(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    nodes: int,
    mask_mode: int,
) -> None:
    """Fill the mask [B * nodes * nodes], the positions [B * nodes] and the links [B, nodes], which come filled with -1.

    A node whose parent was not kept stays unlinked, as in SGLang.
    """
    if int(mask_mode) != QLEN_ONLY:
        raise NotImplementedError(f"the stand-in for sgl_kernel builds masks of draft tokens only, not mode {int(mask_mode)}")
    batch = len(seq_lens)
    masks, places = tree_mask.view(batch, nodes, nodes), positions.view(batch, nodes)
    retrieve_index.copy_(torch.arange(batch * nodes).view(batch, nodes))
    masks.fill_(False)
    for b in range(batch):
        parents = _parents(parent_list[b].tolist(), selected_index[b].tolist(), topk)
        last_child: dict[int, int] = {}
        for node in range(1, nodes):
            parent = parents[node]
            if parent is None:
                continue
            if parent in last_child:
                retrieve_next_sibling[b, last_child[parent]] = node
            else:
                retrieve_next_token[b, parent] = node
            last_child[parent] = node
        for node in range(nodes):
            path = _path(parents, node)
            masks[b, node, [0, *path]] = True
            places[b, node] = seq_lens[b] + len(path)


def _parents(rows: list[int], selected: list[int], topk: int) -> list[int | None]:
    """The parent of every node; None for the root and where the parent was not kept."""
    node_of = {candidate: i + 1 for i, candidate in reversed(list(enumerate(selected)))}
    return [None, *(0 if c < topk else node_of.get(rows[c // topk]) for c in selected)]


def _path(parents: list[int | None], node: int) -> list[int]:
    """The node and its ancestors, the root excluded."""
    path = []
    current: int | None = node
    while current:
        path.append(current)
        current = parents[current]
    return path


def verify_tree_greedy_cpu(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Walk every tree along the target's predictions.

    Args:
        predicts: int32 [B * N], filled at every node that was passed with what the target says there.
        accept_index: int32 [B, S], filled with the path's flat nodes, the root first; S is how many it may hold.
        accept_token_num: int32 [B], filled with the accepted tokens, the bonus excluded.
        candidates: [B, N], the drafted tokens; the links are [B, N] too, spelt as SGLang calls them.
        retrive_index, retrive_next_token, retrive_next_sibling: see `build_tree_kernel_efficient_cpu`.
        target_predict: [B, N].
    """
    batch, most = accept_index.shape
    for links in (candidates, retrive_index, retrive_next_token, retrive_next_sibling, target_predict):
        # the CUDA kernel reads the memory as it lies
        assert links.is_contiguous()
        assert links.dtype == torch.int64
        assert links.shape == candidates.shape
    wanted = target_predict.view(batch, -1)
    for b in range(batch):
        path = [0]
        while len(path) < most:
            token, child = int(wanted[b, path[-1]]), int(retrive_next_token[b, path[-1]])
            while child >= 0 and int(candidates[b, child]) != token:
                child = int(retrive_next_sibling[b, child])
            if child < 0:
                break
            path.append(child)
        accept_token_num[b] = len(path) - 1
        for i, node in enumerate(path):
            flat = int(retrive_index[b, node])
            accept_index[b, i] = flat
            predicts[flat] = int(wanted[b, node])


def fill_bonus_tokens_cpu(accept_tokens: torch.Tensor, accept_lens: torch.Tensor, bonus: torch.Tensor, stride: int) -> None:
    """The last of every request's accepted tokens; `stride` of them are reserved per request and accept_lens count the bonus."""
    last = torch.arange(len(accept_lens)) * stride + accept_lens.long() - 1
    bonus.copy_(accept_tokens.flatten()[last].to(bonus.dtype))


def rotate_input_ids_cpu(
    ids: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, new: torch.Tensor, select: torch.Tensor | None = None
) -> None:
    """Move each request's tokens one to the left and put its new token last, or at the flat place that `select` names."""
    tokens = new.flatten()
    for i, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        if length > 0:
            ids[start : start + length - 1] = ids[start + 1 : start + length].clone()
            ids[start + length - 1 if select is None else int(select[i])] = tokens[i].to(ids.dtype)
