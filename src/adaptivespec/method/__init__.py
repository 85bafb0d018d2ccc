"""The method: draft trees, acceptance rules, tree policies. Batched torch tensors in and out, free of any engine."""
