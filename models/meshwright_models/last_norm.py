"""Norms after the last block. Shapes: B samples, S tokens, D hidden."""

from __future__ import annotations

from torch import Tensor, nn

from meshwright_models.multi_token import SideTensors

Value = Tensor | tuple[Tensor, ...]
"""Activations x (B, S, D), or x and what travels beside it."""


class LastLayerNorm(nn.LayerNorm):
    """LayerNorm after the last block: x (B, S, D) or (x, starts) -> x.
    Later layers treat each token separately.

    ``multiplier``: factor on the result, and so on the logits of a head without bias.
    """

    multiplier = 1.0

    def forward(self, value: Value) -> Value:  # type: ignore[override]
        """Normalise x (B, S, D) and drop ``starts``, unless modules that need the ids follow."""
        carried = SideTensors(value)
        return _last(carried, super().forward(carried.x), self.multiplier)


class LastRMSNorm(nn.RMSNorm):
    """RMSNorm after the last block: x (B, S, D) or (x, starts) -> x. ``multiplier``:
    factor on the result.
    """

    multiplier = 1.0

    def forward(self, value: Value) -> Value:  # type: ignore[override]
        """Normalise x (B, S, D) and drop ``starts``, unless modules that need the ids follow."""
        carried = SideTensors(value)
        return _last(carried, super().forward(carried.x), self.multiplier)


LastNorm = LastLayerNorm | LastRMSNorm


def _last(carried: SideTensors, x: Tensor, multiplier: float) -> Value:
    """Return x (B, S, D) times ``multiplier``,
    with what travels beside it if later layers need the ids.
    """
    x = x if multiplier == 1 else x * multiplier
    return x if carried.ids is None else carried.beside(x)
