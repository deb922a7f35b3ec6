"""Ranks, nodes and axes: the pure grid, and the mesh with its process groups. Only this room calls
torch.distributed."""
