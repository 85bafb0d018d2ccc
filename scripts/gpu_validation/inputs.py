"""Heads, questions and tiny models."""

from __future__ import annotations

import json
import shutil
import sys
from importlib import resources
from pathlib import Path

from .answers import Question
from .server import TESTS


def prepared_head(head: str, folder: Path) -> str:
    """A head that SGLang loads as EAGLE-3's: one that calls itself a LlamaForCausalLM, as public ones do, gets a copy that does not."""
    source = Path(head).expanduser()
    if not source.is_dir():
        from huggingface_hub import snapshot_download

        source = Path(snapshot_download(head, allow_patterns=["*.json", "*.safetensors", "*.bin"]))
    config = json.loads((source / "config.json").read_text())
    if config.get("architectures") != ["LlamaForCausalLM"]:
        return str(source)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file in source.iterdir():
        if file.name != "config.json" and file.is_file():
            (folder / file.name).symlink_to(file.resolve())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLMEagle3"]}, indent=2))
    return str(folder)


def load_questions(model: str, limit: int, file: Path | None) -> list[Question]:
    """The packaged prompts as the model's chat template has them, or the texts of a file's fields `prompt` as they are."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    source = resources.files("adaptivespec.evaluation") / "data" / "prompts.jsonl" if file is None else file
    texts = [json.loads(line)["prompt"] for line in source.read_text("utf-8").splitlines() if line.strip()][:limit]
    if file is None and tokenizer.chat_template:
        chats = [[{"role": "user", "content": text}] for text in texts]
        texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
        return [Question(tokenizer(text, add_special_tokens=False).input_ids) for text in texts]
    return [Question(tokenizer(text).input_ids) for text in texts]


def tiny_models(folder: Path) -> tuple[str, str, Path]:
    """The test bed's models, the head published as public ones are: its architecture is Llama's and its context short."""
    sys.path[:0] = [str(TESTS / "sglang" / "standins"), str(TESTS / "sglang"), str(TESTS)]
    import torchvision_operators

    torchvision_operators.define_when_needed()
    from bed_models import KNOWN, UNKNOWN, make_models

    prompts = folder / "prompts.jsonl"
    if not prompts.is_file():
        bed = make_models(folder)
        config = json.loads((bed.eagle3 / "config.json").read_text())
        (bed.eagle3 / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 64}))
        prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in UNKNOWN + KNOWN))
    return str(folder / "target"), str(folder / "eagle3"), prompts
