"""Ranks, nodes, axes: the pure grid, and the mesh with its process groups. Only this room says torch.distributed."""
