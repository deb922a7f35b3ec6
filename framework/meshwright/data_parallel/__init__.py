"""Data parallelism: gradients in flat buckets, their reductions,
and shards of the state under ZeRO-1, 2 and 3.
"""
