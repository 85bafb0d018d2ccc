"""Prefill, and the decoding step: draft, verify, accept, commit. Batched; every request has its own tree."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate

import torch

from ..drafters.base import Drafter
from ..method.acceptance import Acceptance, VerifyInputs
from ..method.grouped import accept_by_rule, grouped, rows_by_rule
from ..method.guards import ProtectedMasks
from ..method.policy import PolicyState, TreePolicy
from ..method.records import StepRecord, StepTotals
from ..method.tree import DraftTree, TreeShape, select_rows, split_rows, spread, stack_rows
from ..models.decoder import Decoder
from ..models.kv_cache import Block
from .request import Request
from .sampling import rule_params, token_logprobs, verify_inputs, with_coins

MOST_UNTOLD = 512
"""Tokens of a request that a resting drafter may owe: they keep features in memory, and their commit is one forward."""


class Runner:
    """Runs the models on slots; knows nothing of queues or text.

    Args:
        decoder: the target.
        drafter: None for plain decoding only.
        context_length: most tokens of prompt and answer together.
        num_slots: most requests at once.
        room: the largest num_steps, topk and num_draft_tokens that any policy may ask for.
        prefill_chunk: prompt tokens per forward.
    """

    def __init__(
        self,
        decoder: Decoder,
        drafter: Drafter | None,
        context_length: int,
        num_slots: int,
        room: TreeShape,
        prefill_chunk: int,
    ) -> None:
        self.decoder, self.drafter, self.prefill_chunk = decoder, drafter, prefill_chunk
        # A tree hangs beyond the context's end until its accepted rows are compacted.
        self.cache = decoder.new_cache(num_slots, context_length + room.num_draft_tokens)
        self.cached = [0] * num_slots
        if drafter is not None:
            drafter.allocate(num_slots, context_length, [room])
        self._protected = ProtectedMasks(decoder.config.vocab_size, decoder.device)
        # What the drafter was not told of while a policy let it rest: tokens, and features of each step, by slot.
        self._untold: dict[int, tuple[list[int], list[torch.Tensor]]] = {}
        self.seconds_caught_up = 0.0  # of the last step's drafting: what an earlier rest had put off
        self._resting: set[TreePolicy] = set()  # policies that in the last step left the drafter alone, for some requests at least

    @torch.inference_mode()
    def prefill(self, request: Request) -> None:
        """Run the prompt and emit the first token."""
        began = time.perf_counter()
        device, slot, prompt = self.decoder.device, request.slot, request.prompt
        drafter = self.drafter if request.drafts else None
        self._untold.pop(slot, None)
        if drafter is not None:
            drafter.start(slot, prompt)
        tokens = torch.tensor(prompt, device=device)
        for start in range(0, len(prompt), self.prefill_chunk):
            end = min(start + self.prefill_chunk, len(prompt))
            rows = end - start
            visible = torch.ones(1, rows, rows, dtype=torch.bool, device=device).tril() if rows > 1 else None
            block = Block([slot], [start], [start], [rows], visible)
            positions = torch.arange(start, end, device=device)
            layers = () if drafter is None else drafter.feature_layers
            hidden, features = self.decoder.forward(tokens[start:end], positions, self.cache, block, layers)
            following = prompt[start + 1 : end + 1]
            if end == len(prompt):
                root = DraftTree.root_only(tokens[-1:])
                logits = self.decoder.logits(hidden[-1:])
                row = torch.zeros(1, 1, dtype=torch.int64, device=device)
                first = int(verify_inputs(logits, row, [request], root, [end - 1], [1]).choice)
                self._emit(request, [first], [False], logits, [0])
                following = [*following, first]
            if drafter is not None and request.finish_reason is None:
                self._tell([slot], [following], features, set() if request.policy in self._resting else {slot})
        self.cached[slot] = len(prompt)
        request.seconds_prefill = time.perf_counter() - began

    @torch.inference_mode()
    def step(self, requests: Sequence[Request]) -> None:
        """One decoding step for all running requests: each emits its accepted tokens and a bonus token."""
        began = time.perf_counter()
        slots = [r.slot for r in requests]
        cached = [self.cached[slot] for slot in slots]
        last = torch.tensor([r.token_ids[-1] for r in requests], device=self.decoder.device)
        state = stack_rows([r.state for r in requests])
        asked = self._asked(requests)
        self.seconds_caught_up = 0.0
        confidence, shapes, tree = self._draft(requests, asked, last, state)
        drafted = time.perf_counter()

        sizes = tree.size.tolist()
        firsts = [0, *accumulate(sizes)]
        logits, features = self._forward(requests, slots, cached, tree, sizes)
        node = torch.arange(tree.tokens.shape[1], device=last.device)
        first_row = torch.tensor(firsts[:-1], device=last.device)[:, None]
        rows = first_row + torch.where(node < tree.size[:, None], node, 0)  # padding repeats the root's row
        inputs = verify_inputs(logits, rows, requests, tree, cached, sizes)
        if any(r.rule.tosses_coins for r in requests):
            inputs = with_coins(inputs, requests, tree, cached)
        if self.decoder.device.type == "cuda":
            torch.cuda.synchronize(self.decoder.device)
        verified = time.perf_counter()

        acceptance = self._accept(requests, tree, inputs)
        planned = torch.tensor([s.num_steps for s in shapes], device=last.device)
        after = grouped([r.policy for r in requests]).update(state, tree, acceptance, planned)
        for request, own in zip(requests, split_rows(after, len(requests)), strict=True):
            request.state = own

        rars, tokens, parents = state.rar.tolist(), tree.tokens.tolist(), tree.parents.tolist()
        paths, bonuses = acceptance.path.tolist(), acceptance.bonus.tolist()
        promoted, margins = acceptance.promoted.tolist(), acceptance.log_margin.tolist()
        going, rows_kept, blocks, records = [], [], [], []
        for b, request in enumerate(requests):
            path = [node for node in paths[b] if node >= 0]
            taken = len(path)
            for margin in margins[b][:taken]:  # one by one: the order in which the rule added them up against the budget
                request.spent -= margin
            block = [tokens[b][node] for node in path] + [bonuses[b]]
            kept = [firsts[b] + node for node in (0, *path)]
            self._emit(request, block, [*promoted[b][:taken], False], logits, kept)
            records.append((request, b, path, margins[b][:taken], promoted[b][:taken]))
            if request.finish_reason is not None:
                self._untold.pop(request.slot, None)
            else:
                self.cache.compact(request.slot, cached[b], [0, *path])
                self.cached[request.slot] = cached[b] + taken + 1
                if request.drafts and self.drafter is not None:
                    going.append(request.slot)
                    blocks.append(block)
                    rows_kept += kept
        self._observe(requests, asked, tree.draft_rows, sizes, [len(path) for _, _, path, _, _ in records])
        accepted = time.perf_counter()
        if going and self.drafter is not None:
            self._tell(going, blocks, None if features is None else features[rows_kept], {requests[row].slot for row in asked})
        done = time.perf_counter()
        seconds_draft, seconds_verify = drafted - began + done - accepted, verified - drafted
        for request, b, path, log_margins, was_promoted in records:
            request.records.append(
                StepRecord(
                    shape=shapes[b] if sizes[b] > 1 else TreeShape.off(),
                    tokens=tokens[b][: sizes[b]],
                    parents=parents[b][: sizes[b]],
                    path=path,
                    promoted=was_promoted,
                    log_margins=log_margins,
                    bonus=bonuses[b],
                    confidence=confidence[b] if sizes[b] > 1 else None,
                    rar=rars[b],
                    spent=request.spent,
                    batch=len(requests),
                    seconds_draft=seconds_draft,
                    seconds_verify=seconds_verify,
                    seconds_rest=accepted - verified,
                    rows=firsts[-1],
                    draft_rows=list(tree.draft_rows),
                )
            )

    @staticmethod
    def _emit(request: Request, tokens: list[int], promoted: list[bool], logits: torch.Tensor, rows: list[int]) -> None:
        """Emit a block; `rows` of the target's own logits [R, V] chose its tokens."""
        top = request.params.logprobs
        request.emit(tokens, promoted, None if top is None else token_logprobs(logits[rows], tokens, top))

    def _asked(self, requests: Sequence[Request]) -> list[int]:
        """The requests for which the drafter is asked in this step."""
        if self.drafter is None:
            return []
        own = _rows_by_policy(requests)
        for rows in own.values():  # a probe asks for those that cost the least to catch up
            rows.sort(key=lambda row: self._owed(requests[row].slot))
        asked = {policy: rows[: policy.asks(len(rows))] for policy, rows in own.items()}
        self._resting = {policy for policy, rows in own.items() if len(asked[policy]) < len(rows)}
        return sorted(row for rows in asked.values() for row in rows)

    @staticmethod
    def _observe(requests: Sequence[Request], asked: list[int], draft_rows: tuple[int, ...], sizes: list[int], taken: list[int]) -> None:
        """Tell each policy what the step brought; `taken` are the accepted drafted tokens of each request."""
        for policy, rows in _rows_by_policy(requests).items():
            policy.observe(
                StepTotals(
                    requests=len(requests),
                    rows=sum(sizes),
                    emitted=sum(taken) + len(taken),
                    draft_rows=draft_rows,
                    own_requests=len(rows),
                    own_rows=sum(sizes[row] for row in rows),
                    accepted=sum(taken[row] for row in rows),
                    asked=sum(row in asked for row in rows),
                )
            )

    def _tell(self, slots: list[int], blocks: list[list[int]], features: torch.Tensor | None, asked: set[int]) -> None:
        """Commit to the drafter, at once where it is asked, else before it is asked again or when much is owed: a request that ends
        while the drafter rests has then cost it nothing."""
        assert self.drafter is not None
        if all(slot in asked for slot in slots):
            self.drafter.commit(slots, blocks, features)
            return
        parts = [None] * len(slots) if features is None else torch.split(features, [len(block) for block in blocks])
        for slot, block, part in zip(slots, blocks, parts, strict=True):
            owed, owed_features = self._untold.setdefault(slot, ([], []))
            owed += block
            if part is not None:
                owed_features.append(part)
        overdue = [slot for slot in slots if self._owed(slot) > MOST_UNTOLD]
        self._catch_up([slot for slot in slots if slot in asked or slot in overdue[:1]])  # one at a time, that nobody waits for all

    def _owed(self, slot: int) -> int:
        """Tokens that the drafter was not told of."""
        return len(self._untold[slot][0]) if slot in self._untold else 0

    def _catch_up(self, slots: list[int]) -> None:
        """Commit what the drafter was not told of, for those of `slots` that have something: together where it is little."""
        assert self.drafter is not None
        slots = [slot for slot in slots if slot in self._untold]
        together = sum(self._owed(slot) for slot in slots) <= self.prefill_chunk
        for group in [slots] if together else [[slot] for slot in slots]:
            if group:
                tokens, features = zip(*(self._untold.pop(slot) for slot in group), strict=True)
                parts = [part for steps in features for part in steps]
                self.drafter.commit(group, tokens, torch.cat(parts) if parts else None)

    def _draft(
        self, requests: Sequence[Request], rows: list[int], last: torch.Tensor, state: PolicyState
    ) -> tuple[list[float | None], list[TreeShape], DraftTree]:
        """Confidence, planned shape and tree of each request; requests other than those in `rows` get their root alone."""
        confidence: list[float | None] = [None] * len(requests)
        shapes = [TreeShape.off()] * len(requests)
        if self.drafter is None or not rows:
            return confidence, shapes, DraftTree.root_only(last)
        everyone = len(rows) == len(requests)
        drafting = [requests[row] for row in rows]
        slots = [request.slot for request in drafting]
        roots, mine = (last, state) if everyone else (last[rows], select_rows(state, rows))
        began = time.perf_counter()
        self._catch_up(slots)
        self.seconds_caught_up = time.perf_counter() - began
        root = self.drafter.begin(slots, max(shape.topk for policy in {r.policy for r in drafting} for shape in policy.reachable()))
        policy = grouped([request.policy for request in drafting])
        reachable = policy.reachable()
        planned = [reachable[index] for index in policy.plan(mine, root).tolist()]
        tree = self.drafter.draft(slots, roots, root, planned, policy, mine)
        for row, shape, value in zip(rows, planned, root.confidence.tolist(), strict=True):
            shapes[row], confidence[row] = shape, value
        return confidence, shapes, tree if everyone else spread(tree, rows, last)

    def _accept(self, requests: Sequence[Request], tree: DraftTree, inputs: VerifyInputs) -> Acceptance:
        """What each request's rule accepts."""
        spent, emitted = [r.spent for r in requests], [len(r.token_ids) for r in requests]
        protected = self._protected.of(r.protected_ids for r in requests)
        params = rule_params([r.config for r in requests], spent, emitted, protected)
        return accept_by_rule(rows_by_rule([r.rule for r in requests]), tree, inputs, params)

    def _forward(
        self, requests: Sequence[Request], slots: list[int], cached: list[int], tree: DraftTree, sizes: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The target on all real nodes, request after request: logits [R, V] and features [R, F]."""
        device, nodes = self.decoder.device, tree.tokens.shape[1]
        positions = tree.depth + torch.tensor(cached, device=device)[:, None]
        visible = tree.ancestor_mask() if nodes > 1 else None
        block = Block(slots, cached, cached, sizes, visible)
        layers = self.drafter.feature_layers if self.drafter is not None and any(r.drafts for r in requests) else ()
        if len(requests) == 1:
            hidden, features = self.decoder.forward(tree.tokens[0], positions[0], self.cache, block, layers)
            return self.decoder.logits(hidden), features
        real = torch.arange(nodes, device=device) < tree.size[:, None]
        hidden, features = self.decoder.forward(tree.tokens[real], positions[real], self.cache, block, layers)
        return self.decoder.logits(hidden), features


def _rows_by_policy(requests: Sequence[Request]) -> dict[TreePolicy, list[int]]:
    """The rows of the requests that draft, by their policy."""
    own: dict[TreePolicy, list[int]] = {}
    for row, request in enumerate(requests):
        if request.drafts:
            own.setdefault(request.policy, []).append(row)
    return own
