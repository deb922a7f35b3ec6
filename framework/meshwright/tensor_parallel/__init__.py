"""Tensor parallelism: sharding plans applied to plain modules, sequence parallelism,
vocab-parallel cross-entropy.
"""
