"""From a name to a drafter, in two phases: `find_drafter` before the target's weights are read, so that a wrong name costs no wait,
and `build_drafter` after.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from ..errors import UserError, nearest
from ..models.catalogue import ModelSource, resolve_drafter
from ..models.loading import LoadedModel, load_model, open_checkpoint
from ..models.tokenizer import check_same_tokenizer, tokens_by_id
from .base import Drafter
from .draft_model import DraftModel
from .eagle3 import Eagle3
from .eagle3_checkpoint import is_head, open_head_weights, read_head_config

Kind = Literal["eagle3", "draft_model", "ngram"]

ALGORITHMS: dict[str, Kind | None] = {
    "EAGLE3": "eagle3",
    "STANDALONE": "draft_model",
    "DRAFT_MODEL": "draft_model",
    "NGRAM": "ngram",
    "PROMPT_LOOKUP": "ngram",
    "NONE": None,
}
"""SGLang's and vLLM's names of what a drafter is."""

_WORDS: dict[Kind, str] = {
    "eagle3": "an EAGLE-3 head (EAGLE3)",
    "draft_model": "a draft model (STANDALONE)",
    "ngram": "prompt lookup (NGRAM)",
}


@dataclass(frozen=True)
class DrafterSource:
    """A drafter that was found: its kind, and its folder or .gguf file (None for ngram)."""

    kind: Kind
    path: Path | None = None


def find_drafter(name: str | Path | None, target: ModelSource, algorithm: str | None = None) -> DrafterSource | None:
    """Find a drafter and check, without reading weights, that it fits the target.

    Args:
        name: `none`, `ngram`, or where a checkpoint is (see `resolve_drafter`); None takes the target's own head, if it has one.
        target: where the target's files are.
        algorithm: one of `ALGORITHMS`, in any case, to insist on a kind of drafter; `NONE` overrides the name.

    Returns:
        None for plain decoding.

    Raises:
        UserError: an unknown name or algorithm, a drafter of another kind than the algorithm says, or one that does not fit.
    """
    wanted = None
    if algorithm is not None:
        key = algorithm.upper().replace("-", "_")
        if key not in ALGORITHMS:
            raise UserError(f"unknown speculative algorithm {algorithm!r}{nearest(key, ALGORITHMS)}")
        wanted = ALGORITHMS[key]
        if wanted is None:
            return None
    source = _resolve(name, target, wanted)
    if wanted is None or (source is not None and source.kind == wanted):
        return source
    if source is not None:
        raise UserError(f"algorithm {algorithm} does not fit the drafter {name or source.path}: that is {_WORDS[source.kind]}")
    if name is None:
        raise UserError(f"algorithm {algorithm} needs {_WORDS[wanted]}: name one as the drafter")
    raise UserError(f"algorithm {algorithm} does not fit the drafter none: name one, or use NONE")


def _resolve(name: str | Path | None, target: ModelSource, wanted: Kind | None) -> DrafterSource | None:
    if str(name).lower() == "ngram" or (name is None and wanted == "ngram"):
        return DrafterSource("ngram")
    if name is None and wanted == "draft_model":
        return None  # a preset's own drafter is a head
    path = resolve_drafter(name, target.preset)
    if path is None:
        return None
    kind = _kind(path)
    if wanted is None or kind == wanted:
        (_check_head if kind == "eagle3" else _check_draft_model)(path, target.path)
    return DrafterSource(kind, path)


def _kind(path: Path) -> Kind:
    return "eagle3" if path.is_dir() and is_head(path) else "draft_model"


def _check_head(head: Path, target: Path) -> None:
    read_head_config(head, open_checkpoint(target)[0])
    open_head_weights(head)


def _check_draft_model(draft: Path, target: Path) -> None:
    size, other = (open_checkpoint(path)[0].vocab_size for path in (target, draft))
    try:
        tokens = tokens_by_id(target), tokens_by_id(draft)
    except UserError as error:
        if size != other:
            raise UserError(
                f"cannot compare the tokenizers ({error}), and the vocabularies differ: {size} tokens for the target, "
                f"{other} for the draft model {draft}"
            ) from None
        return
    check_same_tokenizer(*tokens, min(size, other))


def build_drafter(
    source: DrafterSource,
    target: LoadedModel,
    dtype: str | torch.dtype,
    device: str | torch.device,
    aux_layers: str = "input",
    prompt_lookup_max: int = 4,
    prompt_lookup_min: int = 1,
) -> Drafter:
    """Load what `find_drafter` found.

    Args:
        source: the drafter.
        target: the model it drafts for.
        dtype, device: of a draft model, as for `load_model`; a head takes the target's.
        aux_layers: of a head, see `read_head_config`.
        prompt_lookup_max, prompt_lookup_min: of ngram, the longest and shortest run of tokens looked up.

    Raises:
        UserError: damaged files, or a drafter that AdaptiveSpec does not support.
    """
    if source.path is None:
        from .ngram import NGram

        return NGram(target.config.vocab_size, target.decoder.device, prompt_lookup_max, prompt_lookup_min)
    if source.kind == "eagle3":
        return Eagle3(source.path, target.decoder, aux_layers)
    return DraftModel(load_model(ModelSource(source.path), dtype, device).decoder, target.decoder)
