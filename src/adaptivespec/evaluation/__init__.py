"""Measuring: arms, prompts, interleaved benchmarks and their statistics."""
