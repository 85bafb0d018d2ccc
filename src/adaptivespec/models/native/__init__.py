"""Kernels of our own for bf16 on CPUs with AVX512-BF16 and without AMX: the bits of a row do not depend on the rows beside it.

So a token that verification accepts is the token that plain decoding gives, bit for bit, whatever the tree and the batch.
"""
