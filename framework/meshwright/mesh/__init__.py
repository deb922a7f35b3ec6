"""Ranks, nodes and axes: the pure grid, and the mesh with its process groups. Only this package
calls torch's collectives; data_parallel/fsdp.py wraps FSDP2.
"""

from meshwright.mesh.expert_groups import expert_group as expert_group
from meshwright.mesh.expert_groups import expert_replicas as expert_replicas
from meshwright.mesh.grid import Axis as Axis
from meshwright.mesh.grid import Coordinates as Coordinates
from meshwright.mesh.grid import Grid as Grid
from meshwright.mesh.placement import check_placement as check_placement
from meshwright.mesh.placement import draw_placement as draw_placement
from meshwright.mesh.placement import nodes_of as nodes_of
