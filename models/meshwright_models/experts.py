"""Mixture of experts: a router, experts, and the feed-forward network of a block that has both.

    x (B, S, D) --> router ---- ids, weights (B, S, k) ----.
       |                                                   |
       |---------> experts: y of the k chosen ones ---> sum of weight * y --> + --> (B, S, D)
       '---------> shared expert (optional) ---------------------------------'

Sources: Fedus et al. 2021 "Switch Transformers"; Jiang et al. 2024 "Mixtral of Experts"
(arXiv:2401.04088); DeepSeek-AI 2024 "DeepSeek-V3" (arXiv:2412.19437, section 2.1.2).

No token is dropped, unless the experts have a capacity (expert_capacity.py). The sum over a token's
k experts has a fixed order, that of ``ids``.

Shapes: B samples, S tokens, N = B S, D hidden, E experts, k experts of a token, R = N k rows, F ffn
size of an expert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright_models.feed_forward import Activation
from meshwright_models.router import Router
from meshwright_models.row_order import FromExperts, ToExperts

ALIGNMENT = 16
"""A grouped product needs rows of its matrices whose bytes this number divides."""


class Experts(nn.Module):
    """Gated feed-forward networks, one for each expert: down(activation(gate(x)) * up(x)).

    ``gate_up`` (E, 2F, D), the F rows of the gate first, and ``down`` (E, D, F), as in
    transformers. E is read from their shapes, so that a slice along dim 0 is again a module of
    experts. ``meta_device``: type of the device that tensors on meta stand for, such as "cuda".
    ``may_drop``: some ids may be E, no expert, because of a capacity.
    """

    def __init__(
        self, num_experts: int, hidden_size: int, ffn_size: int, *, activation: Activation
    ) -> None:
        super().__init__()
        self.activation = activation
        self.meta_device, self.may_drop = "", False
        self.gate_up = nn.Parameter(torch.empty(num_experts, 2 * ffn_size, hidden_size))
        self.down = nn.Parameter(torch.empty(num_experts, hidden_size, ffn_size))
        # for Muon: gate and up are two matrices
        self.fused_rows = {"gate_up": (ffn_size, ffn_size)}
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights of each expert as ``nn.Linear`` does."""
        for weight in (self.gate_up, self.down):
            nn.init.uniform_(weight, -(weight.shape[-1] ** -0.5), weight.shape[-1] ** -0.5)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the weighted sum over each token's experts, (..., D) in the dtype of x.

        x: (..., D); ids: (..., k) int64 in 0 .. E - 1, or E: no expert; weights: (..., k), None for
        a sum without weights. Rows of one expert are in the order of the tokens.
        """
        top_k, hidden_size = ids.shape[-1], x.shape[-1]
        chosen = ids.reshape(-1)
        order = chosen.argsort(stable=True)  # (R,)
        inverse = torch.empty_like(order).scatter_(
            0, order, torch.arange(order.shape[0], device=order.device)
        )
        rows: Tensor = ToExperts.apply(x.reshape(-1, hidden_size), order, inverse, top_k)
        y: Tensor = FromExperts.apply(self._by_expert(rows, chosen), order, inverse)
        y = y.view(*ids.shape, hidden_size)
        if weights is not None:
            y = y * weights.unsqueeze(-1)
        return (y.sum(-2) if top_k > 1 else y.squeeze(-2)).to(x.dtype)

    def _by_expert(self, rows: Tensor, chosen: Tensor) -> Tensor:
        """Apply its expert to each row. rows: (R, D), sorted by expert; chosen: (R,)
        ids in any order. Return (R, D).

        One grouped product for all experts in bfloat16 on CUDA, otherwise a loop over the experts.
        """
        num_experts = self.gate_up.shape[0]
        if self.can_group(rows):
            counts = chosen.new_zeros(num_experts + 1).scatter_add_(
                0, chosen, torch.ones_like(chosen)
            )
            # bincount would synchronise with the device
            ends = counts[:-1].cumsum(0).to(torch.int32)
            without = (
                torch.arange(len(rows), device=rows.device).unsqueeze(1) >= ends[-1]
                if self.may_drop
                else None
            )
            # a product leaves such rows unwritten
            rows = rows if without is None else rows.masked_fill(without, 0.0)
            gate, up = F.grouped_mm(rows, self.gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
            y = F.grouped_mm(self.activation(gate) * up, self.down.transpose(1, 2), offs=ends)
            return y if without is None else y.masked_fill(without, 0.0)
        return self._in_turn(rows, chosen)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _in_turn(self, rows: Tensor, chosen: Tensor) -> Tensor:
        """Apply its expert to each row, expert by expert. Never compiled:
        the numbers of rows change in every call.
        """
        *parts, others = rows.split(rows_of(chosen, self.gate_up.shape[0]))
        found = []  # experts without rows too: their gradient is then zero, not None
        for part, gate_up, down in zip(
            parts, self.gate_up.unbind(), self.down.unbind(), strict=True
        ):
            gate, up = F.linear(part, gate_up).chunk(2, -1)
            found.append(F.linear(self.activation(gate) * up, down))
        return torch.cat([*found, torch.zeros_like(others)] if len(others) else found)

    def can_group(self, rows: Tensor) -> bool:
        """Return whether torch has a grouped product for the rows (R, D) and these weights."""
        device = self.meta_device if rows.is_meta else rows.device.type
        fits = (
            device == "cuda"
            and rows.dtype == self.gate_up.dtype == torch.bfloat16
            and type(rows) is Tensor
        )
        return fits and not any(
            size * 2 % ALIGNMENT for size in (*self.down.shape[1:], self.gate_up.shape[1] // 2)
        )

    def extra_repr(self) -> str:
        return (
            f"{self.gate_up.shape[0]} experts, {self.down.shape[1]} -> {self.down.shape[2]} ->"
            f" {self.down.shape[1]}"
        )


def rows_of(chosen: Tensor, num_experts: int) -> list[int]:
    """Return the number of rows of each expert, then of none. chosen: (R,) int64,
    the expert of each row, E for none.

    Fake tensors and those on meta have no values: their rows are split evenly, with one more for
    the first experts.
    """
    if type(chosen) is not Tensor or chosen.is_meta:
        each, rest = divmod(chosen.shape[0], num_experts)
        return [*(each + (expert < rest) for expert in range(num_experts)), 0]
    counts: list[int] = chosen.bincount(minlength=num_experts + 1).tolist()
    return counts


class MoE(nn.Module):
    """Mixture of experts as the feed-forward network of a block, (B, S, D) -> (B, S, D).

    Args:
        shared: feed-forward network that every token passes, added to the experts' output.
        shared_gate: linear from D to 1 feature, whose sigmoid multiplies the shared network's
            output (Qwen2-MoE).
    """

    def __init__(
        self,
        router: Router,
        experts: Experts,
        shared: nn.Module | None = None,
        shared_gate: nn.Linear | None = None,
    ) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self.shared = shared
        self.shared_gate = shared_gate
        # of an optimizer of matrices: the router is stepped by AdamW
        self.fused_rows = {"router": "adamw"}

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.router(x)
        y: Tensor = self.experts(x, ids, weights)
        if self.shared is None:
            return y
        shared: Tensor = self.shared(x)
        return y + (shared if self.shared_gate is None else self.shared_gate(x).sigmoid() * shared)
