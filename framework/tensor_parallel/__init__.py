"""Tensor parallelism: a sharding plan applied to plain modules, sequence parallelism, vocab-parallel cross-entropy."""
