"""Rotary position embedding, with one table of cosines and sines for all blocks of a process.

S tokens, r rotated features of a head (all of them unless the model has partial rotary positions).
A table is (2, N, r/2): cosines and sines of positions 0 .. N-1, the first S of them used by a
sequence.

The angles are computed in float64; the table has the dtype of x, float32 at least. Computing it
takes 9 kernels, most of them in float64; reading it takes none.

    Llama-3-8B, S 8,192     4 MB for all blocks and micro-batches
    S 131,072              67 MB

Fake tensors have tables of their own, one set per fake mode, which ends with it: a dry run neither
leaves a table to a real run nor reads one, and holds as many bytes. Other subclasses of tensors
compute angles at each call.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import index

import torch
from torch import Tensor, nn

_ROWS = 256
"""Tables have a multiple of this many positions, because generation adds one token at a time."""
Tables = dict[tuple[tuple[float, ...], float, torch.device, torch.dtype], Tensor]
_TABLES: Tables = {}
"""(radians per token, scale, device, dtype) -> the longest table computed so far."""


class Rotary(nn.Module):
    """Rotary position embedding: cos and sin of the angles, each (S, r/2), for activations (..., S,
    head_dim).

    With positions (B, S) each is (B, 1, S, r/2). Both are multiplied by ``scale`` (YaRN).

    The frequencies stay float64 when the model is cast. In bfloat16 some pairs would be off by
    whole turns within 8,192 tokens. The module holds no table: its state, copies and pickles stay
    those of the frequencies.
    """

    frequencies: Tensor

    def __init__(self, frequencies: list[float], scale: float = 1.0) -> None:
        super().__init__()
        self.values = tuple(frequencies)
        self.scale = scale
        self.register_buffer("frequencies", self._on(torch.device("cpu")), persistent=False)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return cos and sin in the dtype of x, float32 at least. x: (..., S, head_dim); positions:
        (B, S) or None.

        Positions are below S.
        """
        length = index(
            x.shape[-2]
        )  # torch.compile: a constant too, so that each length compiles once
        dtype = torch.promote_types(x.dtype, torch.float32)
        if x.is_meta:
            table = torch.empty(2, length, len(self.values), dtype=dtype, device=x.device)
        elif type(x) is Tensor:
            table = self.table(length, x.device, dtype)
        elif (mode := getattr(x, "fake_mode", None)) is not None:
            table = self._extend(
                vars(mode).setdefault("rotary_tables", {}), length, x.device, dtype
            )
        else:
            table = _compute(self.frequencies, self.scale, length, x.device, dtype)
        cos, sin = table[0, :length], table[1, :length]
        return (
            (cos, sin) if positions is None else (cos[positions][:, None], sin[positions][:, None])
        )

    # A constant of the compiled graph: neither a break nor a kernel.
    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def table(self, length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return cos and sin of at least ``length`` positions, (2, N, r/2), shared by all callers:
        read only.
        """
        return self._extend(_TABLES, length, device, dtype)

    def _extend(
        self, tables: Tables, length: int, device: torch.device, dtype: torch.dtype
    ) -> Tensor:
        """Return the table (2, N, r/2) of ``tables`` with ``length`` positions or more;
        compute it if there is none.
        """
        key = (self.values, self.scale, device, dtype)
        table = tables.get(key)
        if table is None or table.shape[1] < length:
            # a table made in inference mode cannot train
            with torch.inference_mode(False), torch.no_grad():
                rows = -(-length // _ROWS) * _ROWS
                table = _compute(self.frequencies, self.scale, rows, device, dtype)
            if type(table) is Tensor or tables is not _TABLES:
                tables[key] = table
        return table

    def _on(self, device: torch.device) -> Tensor:
        return torch.tensor(self.values, dtype=torch.float64, device=device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotary:
        """Move with the module between devices, the meta device included,
        but ignore dtype casts.
        """
        super()._apply(fn, recurse)
        self.frequencies = self._on(self.frequencies.device)
        return self


def _compute(
    frequencies: Tensor, scale: float, length: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Return ``scale`` times cos and sin of positions 0 .. length-1, (2, length, r/2) of ``dtype``.
    frequencies: (r/2,) float64.
    """
    places = torch.arange(length, dtype=torch.float64, device=device)
    angles = torch.outer(places, frequencies.to(device))
    return torch.stack([turn(angles).mul_(scale).to(dtype) for turn in (torch.cos, torch.sin)])
