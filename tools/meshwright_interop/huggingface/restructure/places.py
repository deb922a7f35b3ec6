"""This rank's tokens in what transformers computes for whole samples: ids, positions,
rotary angles.

Shapes: B samples, S tokens of a sample, S/cp tokens of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.utils._pytree import tree_map_only

from meshwright.errors import ModelError
from meshwright_interop.huggingface.restructure.marks import (
    Arguments,
    first_argument,
    with_first_argument,
)


def at_places(whole: Tensor, places: Tensor | None, dim: int = 1) -> Tensor:
    """Return the elements at ``places`` (1 or B, S/cp) along ``dim``, (B, .., S, ..) -> (B, ..,
    S/cp, ..).

    ``places`` = None: the tensor itself. With other places in each sample a first dim of 1 becomes
    B.
    """
    if places is None:
        return whole
    if len(places) == 1:
        return whole.index_select(dim, places[0])
    index = places.view(len(places), *[1] * (dim - 1), -1, *[1] * (whole.dim() - dim - 1))
    shape = [len(places), *whole.shape[1:]]
    shape[dim] = places.shape[1]
    return whole.expand(len(places), *whole.shape[1:]).gather(dim, index.expand(shape))


def own_arguments(arguments: Arguments, places: Tensor | None, size: Sequence[int]) -> Arguments:
    """Return a module's arguments with this rank's tokens in all but the first one,
    the hidden states.

    Positions (1 or B, S), and tensors (1 or B, .., S, r), as rotary angles are, are cut. ``size``:
    (B, S).

    Raises:
        ModelError: another tensor has S elements in a dim.
    """
    if places is None or not any(arguments):
        return arguments
    samples, length = size

    def cut(whole: Tensor) -> Tensor:
        tokens = 1 if whole.dim() == 2 else whole.dim() - 2
        others = [*whole.shape[1:tokens], *whole.shape[tokens + 1 :]] if whole.dim() > 3 else []
        if (
            tokens > 0
            and whole.shape[tokens] == length
            and whole.shape[0] in (1, samples)
            and length not in others
        ):
            return at_places(whole, places, tokens)
        if length in whole.shape:
            raise ModelError(
                "MW-INTEROP-138",
                f"the model's code passes a tensor {tuple(whole.shape)} to its layers, which is not"
                f" indexed by the {length} tokens of a sample in its last dim but one: use"
                " parallel.cp = 1",
            )
        return whole

    hidden = first_argument(*arguments)
    return with_first_argument(
        tree_map_only(Tensor, cut, with_first_argument(arguments, None)), hidden
    )
