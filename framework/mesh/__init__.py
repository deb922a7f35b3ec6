"""Rank grid, node placement and process groups. No other package imports torch.distributed."""
