"""Bytes that a layout must put on the wire in one step, by the formulas of the literature;
nothing is measured.

Per rank, in elements, with Psi parameters on the rank, d replicas, t tensor-parallel ranks, b
samples of s tokens in a micro-batch, h hidden, m micro-batches per replica:

    data parallel     2 Psi (d-1)/d                  once per step: all-reduce, or reduce-scatter + all-gather (ZeRO-1;
                                                     Rajbhandari et al. 2020, section 7)
    tensor parallel   8 b s h (t-1)/t                per block and micro-batch: 2 all-reduces forward, 2 backward
                                                     (Shoeybi et al. 2019, section 3; 2 M (t-1)/t
                                                     each)
                      2 b s h (t-1)/t                per micro-batch for the vocabulary-parallel embedding (forward),
                                                     and as much for the head (backward)
                      3 x 2 b s (t-1)/t              per micro-batch for the loss: one maximum, two sums of each token
    pipeline          b s h                          per micro-batch, boundary and direction
    all ranks         2 x (STEP_NUMBERS + p) (n-1)/n of 8 bytes: loss, labels, gradient norm, a clock reading, three
                                                     flags; a clock reading for each pipeline rank
"""

from __future__ import annotations

from task import GLOBAL_BATCH, HIDDEN_SIZE, MICRO_BATCH_SIZE, SEQUENCE_LENGTH, run_config

from meshwright.blueprint import draw_blueprint
from meshwright.mesh import Axis, Grid
from meshwright.mesh.comm import Group

FLOAT32 = 4
FLOAT64 = 8
STEP_NUMBERS = 9


def expected_bytes(
    rank: int, dp: int, pp: int, tp: int, *, tied: bool
) -> dict[tuple[int, ...], float]:
    """Return {ranks of a group: bytes that this rank sends in one step}.
    Axes with the same ranks share an entry.
    """
    grid = Grid(pp=pp, dp=dp, tp=tp)
    at = grid.coordinates(rank)
    blueprint = draw_blueprint(
        run_config(dp, pp, tp, tied=tied), Group("tp", tuple(range(tp)), at.tp_rank)
    )
    layers = blueprint.stage_layers(at.pp_rank)
    names = [name for name, _ in layers.named_children()]
    num_parameters = sum(parameter.numel() for parameter in layers.parameters())
    num_blocks = sum(name.startswith("block") for name in names)
    chunks = GLOBAL_BATCH // dp // MICRO_BATCH_SIZE
    tokens = MICRO_BATCH_SIZE * SEQUENCE_LENGTH
    all_reduced = 4 * num_blocks * HIDDEN_SIZE
    all_reduced += HIDDEN_SIZE * ("embedding" in names) + (HIDDEN_SIZE + 3) * ("head" in names)
    # this rank sends across each once, forward or backward
    boundaries = (at.pp_rank > 0) + (at.pp_rank < pp - 1)
    n = dp * pp * tp
    by_axis = {
        Axis.DP: 2 * num_parameters * (dp - 1) / dp * FLOAT32,
        Axis.TP: 2 * tokens * all_reduced * (tp - 1) / tp * chunks * FLOAT32,
        Axis.PP: float(tokens * HIDDEN_SIZE * boundaries * chunks * FLOAT32),
    }
    found = {tuple(range(n)): 2 * (STEP_NUMBERS + pp) * (n - 1) / n * FLOAT64}
    for axis, wire_bytes in by_axis.items():
        ranks = grid.group(axis, rank)
        found[ranks] = found.get(ranks, 0.0) + wire_bytes
    return {ranks: wire_bytes for ranks, wire_bytes in found.items() if wire_bytes}


def labels(grid: Grid, rank: int) -> dict[tuple[int, ...], str]:
    """Return {ranks of each group of this rank: the axes that use it};
    all ranks together are the world.
    """
    found = {tuple(range(grid.size)): "world"}
    for axis in Axis:
        ranks = grid.group(axis, rank)
        if len(ranks) > 1:
            found[ranks] = f"{axis} + {found[ranks]}" if ranks in found else str(axis)
    return found
