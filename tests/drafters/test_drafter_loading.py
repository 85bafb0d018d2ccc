"""From a name to a drafter: which kind it is, and what is refused before any weights are read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from adaptivespec.drafters.draft_model import DraftModel
from adaptivespec.drafters.eagle3 import Eagle3
from adaptivespec.drafters.loading import DrafterSource, build_drafter, find_drafter
from adaptivespec.errors import UserError
from adaptivespec.models import catalogue
from adaptivespec.models.catalogue import PRESETS, ModelSource
from adaptivespec.models.loading import load_model
from tiny_heads import make_tiny_head
from tiny_models import make_tiny_model, write_gguf


class Places:
    """Where a target and drafters of every kind are."""

    def __init__(self, root: Path) -> None:
        self.target = ModelSource(make_tiny_model("llama", root / "target"))
        self.head = make_tiny_head(root / "head")
        self.speculators = make_tiny_head(root / "speculators", layout="speculators", format="bin")
        self.draft = make_tiny_model("qwen2", root / "draft", seed=1)
        self.gguf = write_gguf(self.draft, root / "draft.gguf", tokenizer_fields(self.target.path))
        self.other = make_tiny_model("llama", root / "other", seed=2)
        tokenizer = self.other / "tokenizer.json"
        tokenizer.write_text(tokenizer.read_text().replace('"A": 65', '"A": 66').replace('"B": 66', '"B": 65'))
        self.bare = make_tiny_model("llama", root / "bare", seed=3)
        self.bare_padded = make_tiny_model("llama", root / "bare_padded", seed=3, padded_vocab=136)
        for folder in (self.bare, self.bare_padded):
            for file in folder.glob("tokenizer*"):
                file.unlink()


def tokenizer_fields(folder: Path) -> dict[str, object]:
    """The tiny models' tokenizer as a GGUF file carries it."""
    from transformers import AutoTokenizer

    tokens = sorted((i, token) for token, i in AutoTokenizer.from_pretrained(folder).get_vocab().items())
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [token for _, token in tokens],
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(tokens) - 2),
        "tokenizer.ggml.merges": ["a b"],
    }


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    return Places(tmp_path_factory.mktemp("places"))


def test_kinds_are_told_apart_and_built(places: Places) -> None:
    target = load_model(places.target, "fp32")
    for path, kind, built in (
        (places.head, "eagle3", Eagle3),
        (places.speculators, "eagle3", Eagle3),
        (places.draft, "draft_model", DraftModel),
        (places.target.path, "draft_model", DraftModel),
    ):
        source = find_drafter(str(path), places.target)
        assert source == DrafterSource(kind, path)
        assert isinstance(build_drafter(source, target, "fp32", "cpu"), built)
    source = find_drafter("NGram", places.target)
    assert source == DrafterSource("ngram")
    assert build_drafter(source, target, "fp32", "cpu", prompt_lookup_max=3, prompt_lookup_min=2).feature_layers == ()
    assert build_drafter(DrafterSource("eagle3", places.head), target, "fp32", "cpu", "output").feature_layers == (2, 3, 3)


def test_a_gguf_file_can_draft_for_a_folder(places: Places) -> None:
    source = find_drafter(places.gguf, places.target)
    assert source == DrafterSource("draft_model", places.gguf)
    assert isinstance(build_drafter(source, load_model(places.target, "fp32"), "fp32", "cpu"), DraftModel)


def test_no_drafter(places: Places) -> None:
    for name, algorithm in (("none", None), ("NONE", "none"), (None, None), (None, "NONE"), (places.head, "none")):
        assert find_drafter(name, places.target, algorithm) is None


@pytest.mark.parametrize(
    ("name", "algorithm", "kind"),
    [
        ("head", "EAGLE3", "eagle3"),
        ("speculators", "eagle3", "eagle3"),
        ("draft", "STANDALONE", "draft_model"),
        ("draft", "draft-model", "draft_model"),
        ("gguf", "draft_model", "draft_model"),
        (None, "ngram", "ngram"),
        (None, "Prompt_Lookup", "ngram"),
        ("ngram", "NGRAM", "ngram"),
    ],
)
def test_algorithms(places: Places, name: str | None, algorithm: str, kind: str) -> None:
    source = find_drafter(getattr(places, name, name) if name else None, places.target, algorithm)
    assert source is not None
    assert source.kind == kind


@pytest.mark.parametrize(
    ("name", "algorithm", "message"),
    [
        ("head", "EAGLE33", "unknown speculative algorithm 'EAGLE33'; did you mean 'EAGLE3'?"),
        ("head", "medusa", "unknown speculative algorithm 'medusa'; known: DRAFT_MODEL, EAGLE3, NGRAM, NONE, PROMPT_LOOKUP, STANDALONE"),
        ("draft", "EAGLE3", "draft: that is a draft model (STANDALONE)"),
        ("gguf", "eagle3", "algorithm eagle3 does not fit the drafter"),
        ("head", "STANDALONE", "head: that is an EAGLE-3 head (EAGLE3)"),
        ("head", "NGRAM", "that is an EAGLE-3 head (EAGLE3)"),
        ("ngram", "EAGLE3", "algorithm EAGLE3 does not fit the drafter ngram: that is prompt lookup (NGRAM)"),
        (None, "STANDALONE", "algorithm STANDALONE needs a draft model (STANDALONE): name one as the drafter"),
        (None, "EAGLE3", "algorithm EAGLE3 needs an EAGLE-3 head (EAGLE3): name one as the drafter"),
        ("none", "NGRAM", "algorithm NGRAM does not fit the drafter none: name one, or use NONE"),
        ("nosuch", None, "no drafter 'nosuch'"),
        ("ngramm", None, "no drafter 'ngramm': not a short name, a .gguf file, a folder or a hub id (owner/name); did you mean 'ngram'?"),
        ("other", None, "the draft model has another tokenizer: token 65 is 'A' for the target and 'B' for the draft model"),
        ("bare_padded", None, "and the vocabularies differ: 128 tokens for the target, 136 for the draft model"),
    ],
)
def test_refusals(places: Places, name: str | None, algorithm: str | None, message: str) -> None:
    with pytest.raises(UserError) as error:
        find_drafter(getattr(places, name, name) if name else None, places.target, algorithm)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_without_a_tokenizer_equal_vocabularies_will_do(places: Places) -> None:
    assert find_drafter(places.bare, places.target) == DrafterSource("draft_model", places.bare)


def test_what_does_not_fit_is_refused_before_weights_are_read(places: Places, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a head for a target of hidden size 32; this target's is 64"):
        find_drafter(make_tiny_head(tmp_path / "a", hidden=32), places.target)
    head = make_tiny_head(tmp_path / "b")
    (head / "model.safetensors").write_bytes((head / "model.safetensors").read_bytes()[:5000])
    with pytest.raises(UserError, match="cut short"):
        find_drafter(head, places.target)
    draft = shutil.copytree(places.draft, tmp_path / "c")
    (draft / "model.safetensors").write_bytes((draft / "model.safetensors").read_bytes()[:5000])
    with pytest.raises(UserError, match="cut short"):
        find_drafter(draft, places.target)
    (tmp_path / "d").mkdir()
    with pytest.raises(UserError, match=r"has no config\.json: neither an EAGLE-3 head nor a draft model"):
        find_drafter(tmp_path / "d", places.target)
    (tmp_path / "d" / "config.json").write_text("{")
    with pytest.raises(UserError, match="cannot read"):
        find_drafter(tmp_path / "d", places.target)


def test_a_short_name_brings_its_own_head(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "_download", lambda repo_id, weights: {"yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": places.head}[repo_id])
    target = ModelSource(places.target.path, PRESETS["llama-3.1-8b-instruct"])
    assert find_drafter(None, target) == find_drafter(None, target, "EAGLE3") == DrafterSource("eagle3", places.head)
    assert find_drafter(None, target, "NGRAM") == DrafterSource("ngram")
    with pytest.raises(UserError, match="algorithm STANDALONE needs a draft model"):
        find_drafter(None, target, "STANDALONE")
