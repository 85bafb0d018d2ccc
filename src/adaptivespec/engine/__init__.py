"""The local engine: prefill, tree verification, commit; `LLM` in `llm.py` is its public face."""
