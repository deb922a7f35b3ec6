"""Muon of the plain reference run: whole weights, loops over experts and matrices,
polynomials of singular values.

It shares no code with the layouts' Muon: formulas are those of the papers, written out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.config import Optimizer
from meshwright.optimizer import peak_rate


def split_rows(num_rows: int, parts: tuple[int, ...]) -> list[Tensor]:
    """Return the row indices of each matrix, (rows,) int64. ``parts``: rows per matrix, repeated;
    (): one matrix.
    """
    if not parts:
        return [torch.arange(num_rows)]
    owners = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor(parts)).repeat(
        num_rows // sum(parts)
    )
    return [torch.nonzero(owners == part).flatten() for part in range(len(parts))]


def orthogonalised(matrix: Tensor, steps: int) -> Tensor:
    """Return the matrix (m, n) after ``steps`` of X <- a X + b (X X^T) X + c (X X^T)^2 X,
    from X / norm(X).
    """
    x: Tensor = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
    x = x / x.norm().clamp_min(1e-7)
    for _ in range(steps):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * (square @ square)) @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.mT


class PlainMuon(torch.optim.AdamW):
    """Muon on the whole weights in ``matrices``, torch's AdamW on all others."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        matrices: Mapping[nn.Parameter, tuple[int, ...]],
        config: Optimizer,
        dtype: torch.dtype,
    ) -> None:
        """Build the optimizer. ``dtype``: compute dtype, also of Newton-Schulz,
        which takes float32 for float16.
        """
        super().__init__(groups, lr=peak_rate(config), betas=config.betas, foreach=False)
        self._matrices, self._config = matrices, config
        self._dtype = torch.float32 if dtype == torch.float16 else dtype
        self._momentum = {parameter: torch.zeros_like(parameter) for parameter in matrices}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step all parameters."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter in self._matrices:
                    self._step(parameter, group["lr"], group["weight_decay"])
                    parameter.grad = None
        super().step()

    def _step(self, parameter: nn.Parameter, rate: float, decay: float) -> None:
        gradient, mu = parameter.grad, self._config.muon_momentum
        assert gradient is not None
        momentum = self._momentum[parameter] = mu * self._momentum[parameter] + (1 - mu) * gradient
        direction = (1 - mu) * gradient + mu * momentum if self._config.nesterov else momentum
        parameter.mul_(1 - rate * decay)
        for weight, wanted in zip(
            *(t.unbind() if t.dim() == 3 else [t] for t in (parameter, direction)), strict=True
        ):
            parts = self._matrices[parameter]
            if any(each < 0 for each in parts):  # of columns
                weight, wanted, parts = weight.mT, wanted.mT, tuple(-each for each in parts)
            for rows in split_rows(weight.shape[0], parts):
                update = orthogonalised(wanted[rows].to(self._dtype), self._config.ns_steps)
                m, n = update.shape
                if self._config.scale == "spectral":
                    scale = max(1.0, m / n) ** 0.5
                else:
                    scale = 0.2 * max(m, n) ** 0.5
                weight[rows] -= rate * scale * update.to(parameter.dtype)
