"""Optimizer settings of each parameter: group factors, matrices, blocks of 8-bit state.
Sampled learning rates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from meshwright.config import Optimizer, ParameterGroup
from meshwright.optimizer.eight_bit import with_blocks
from meshwright.optimizer.learning_rate import learning_rate
from meshwright.optimizer.matrix_plan import with_matrices
from meshwright.parameters import GroupSettings, ParameterInfo


def with_settings(
    infos: Mapping[str, ParameterInfo],
    optimizer: Optimizer,
    groups: Mapping[str, ParameterGroup],
    matrices: Mapping[str, tuple[int, ...]],
    canonical: Callable[[str], str],
) -> dict[str, ParameterInfo]:
    """Return ``infos`` with the fields that the optimizer reads: ``matrix``, ``settings``,
    ``is_eight_bit``.

    Args:
        groups: canonical name -> group of ``model.parameter_groups``; other parameters have the
            defaults.
        matrices: canonical name -> rows of the parts of a weight's matrices.
        canonical: function from a parameter's name to the canonical one of its tied set.

    Raises:
        UserError: tp cuts matrices or blocks that must stay whole.
    """
    filled = with_matrices(infos, matrices, canonical)
    for name, info in filled.items():
        group = groups.get(canonical(name))
        if group is not None:
            settings = GroupSettings(
                rate_factor=group.learning_rate_factor,
                eps_factor=group.eps_factor,
                weight_decay=group.weight_decay,
            )
            filled[name] = info._replace(settings=settings)
    if optimizer.has_blocks:
        return with_blocks(filled, optimizer.block_size)
    return filled


def sampled_rates(optimizer: Optimizer, num_steps: int) -> list[float]:
    """Return the learning rates of up to 33 evenly spaced steps, first and last included,
    which ranks compare.
    """
    steps = sorted({round(part * (num_steps - 1) / 32) for part in range(33)})
    return [learning_rate(optimizer, step, num_steps) for step in steps]
