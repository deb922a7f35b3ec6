"""Ranks, nodes, axes: the pure grid, and the mesh with its process groups (the only room that says torch.distributed)."""
