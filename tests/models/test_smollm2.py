"""The real SmolLM2-135M from its packaged GGUF, against transformers reading the same file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from test_logits import logits

from adaptivespec.models.loading import LoadedModel, load_model
from adaptivespec.models.tokenizer import encode_chat


@pytest.fixture(scope="module")
def model(smollm2_gguf: Path) -> LoadedModel:
    loaded = load_model("smollm2-135m", "float32")
    assert loaded.source.path == smollm2_gguf
    return loaded


def transformers_model(file: Path) -> Any:
    """transformers' Llama with the published configuration and the file's tensors, read by the gguf package.

    from_pretrained(gguf_file=...) gives the same logits, but wants the accelerate package and takes four times as long.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    with torch.device("meta"):
        shapes = {name: parameter.shape for name, parameter in LlamaForCausalLM(config).named_parameters()}
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    assert len(stored) == len(shapes)  # the head is tied to the embedding
    tensors = {}
    for name, shape in shapes.items():
        tensor = stored[names.get_name(name, try_suffixes=(".weight",))]
        array = gguf.dequantize(tensor.data, tensor.tensor_type)
        if ".q_proj." in name or ".k_proj." in name:  # llama.cpp interleaves the halves of each head of 64
            array = array.reshape(-1, 32, 2, array.shape[1]).swapaxes(1, 2)
        tensors[name] = torch.tensor(array.reshape(shape))
    return LlamaForCausalLM.from_pretrained(None, config=config, state_dict=tensors).eval()


def test_configuration(model: LoadedModel) -> None:
    config = model.config
    assert (config.architecture, config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == ("llama", 30, 576, 9, 3)
    assert (config.vocab_size, config.max_position_embeddings, config.rope_theta) == (49152, 8192, 100000.0)
    assert config.tie_word_embeddings
    assert config.eos_token_ids[0] == 2


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")  # renamed in later versions of transformers
@torch.inference_mode()
def test_logits_equal_transformers(model: LoadedModel, smollm2_gguf: Path) -> None:
    """Prefill against prefill and steps against steps: logits reach 38, and transformers' own steps and prefill already
    differ by 9.5e-5 in fp32. Measured here: 8.6e-5 for the prefill, below 5e-5 for the steps.
    """
    prompt = "Write a Python function that returns the first 10 prime numbers, then explain it."
    ids = torch.tensor(encode_chat(model.load_tokenizer(), [{"role": "user", "content": prompt}]))
    reference, prefill = transformers_model(smollm2_gguf), len(ids) - 8
    output = reference(ids[None, :prefill], use_cache=True)
    rows = [output.logits[0]]
    for i in range(prefill, len(ids)):
        output = reference(ids[None, i : i + 1], past_key_values=output.past_key_values, use_cache=True)
        rows.append(output.logits[0])
    got, wanted = logits(model.decoder, ids, prefill), torch.cat(rows)
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)
    assert torch.equal(got.argmax(-1), wanted.argmax(-1))


def test_tokenizer_splits_digits_and_round_trips(model: LoadedModel) -> None:
    tokenizer = model.load_tokenizer()
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("12345 apples")) == ["1", "2", "3", "4", "5", "Ġapples"]
    for text in ["Hello, world!", "  two  spaces\n\n\ttab", "naïve café 你好 🙂", "def f(x):\n    return x ** 2", "I'll don't we've"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<|im_start|>user<|im_end|>") == [1, *tokenizer.encode("user"), 2]


def test_chat_prompt(model: LoadedModel) -> None:
    tokenizer = model.load_tokenizer()
    ids = encode_chat(tokenizer, [{"role": "user", "content": "Hi"}])
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
