"""Preparation of a corpus: text files to a Megatron ``.bin/.idx`` pair, in parallel, resumable, published whole."""
