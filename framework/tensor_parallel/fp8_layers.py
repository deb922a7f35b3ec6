"""Column and row linears in float8: scales agreed over tp where tp cuts the contracted dim.

layer    forward contracts    backward contracts    exponents agreed over tp
column   I, whole             O, cut                in backward: (B, S) of dy and I of W
row      I, cut               O, whole              in forward: (B, S) of x and O of W
"""

from __future__ import annotations

from torch import Tensor

from meshwright.fp8.linear import fp8_linear
from meshwright.mesh.comm import Group
from meshwright.tensor_parallel.regions import copy_in, gather_sequence, outside_graphs


@outside_graphs
def fp8_column(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, sequence: bool, gathered: bool = False
) -> Tensor:
    """Return this rank's output features: x (B, S, I), or (B, S/tp, I) with ``sequence`` -> (B, S, O/tp).

    Communication as in :func:`meshwright.tensor_parallel.column.column_linear`, and an all-reduce of exponents over tp
    in backward. ``gathered``: an enclosing module communicates x and its gradient.
    """
    if not gathered:
        x = gather_sequence(x, group) if sequence else copy_in(x, group)
    return fp8_linear(x, weight, bias, cut_out=group)


@outside_graphs
def fp8_row(x: Tensor, weight: Tensor, group: Group) -> Tensor:
    """Return partial sums of the output: x (B, S, I/tp), weight (O, I/tp) -> (B, S, O). Agrees exponents over tp."""
    return fp8_linear(x, weight, cut_in=group)
