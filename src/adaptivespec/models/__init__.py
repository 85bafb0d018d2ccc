"""The target model: one decoder for Llama, Qwen2 and Qwen3, its KV cache, its weights, the short names."""
