"""Trees as paths of tokens, to compare them without regard to the order of nodes."""

from __future__ import annotations

from adaptivespec.method.tree import DraftTree


def paths(tree: DraftTree, row: int = 0) -> dict[tuple[int, ...], float]:
    """Paths of drafted tokens and their log-probabilities."""
    found: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(1, int(tree.size[row])):
        parent = int(tree.parents[row, node])
        assert parent < node
        found[node] = (*found[parent], int(tree.tokens[row, node]))
        assert tree.depth[row, node] == len(found[node])
    return {path: float(tree.log_probs[row, node]) for node, path in found.items() if node}
