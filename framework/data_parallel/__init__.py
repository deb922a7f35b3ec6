"""The data-parallel axis: gradients in flat buckets, reduced once per step, and their shards under ZeRO-1, 2 and 3."""
