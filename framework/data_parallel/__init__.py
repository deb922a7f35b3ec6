"""The data-parallel axis: gradients in flat buckets, reduced once per step, and ZeRO-1's shards of them."""
