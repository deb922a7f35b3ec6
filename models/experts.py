"""Mixture of experts: a router, experts, and the feed-forward network of a block that has both.

    x (B, S, D) --> router ---- ids, weights (B, S, k) ----.
       |                                                   |
       |---------> experts: y of the k chosen ones ---> sum of weight * y --> + --> (B, S, D)
       '---------> shared expert (optional) ---------------------------------'

Sources: Fedus et al. 2021 "Switch Transformers"; Jiang et al. 2024 "Mixtral of Experts" (arXiv:2401.04088); DeepSeek-AI
2024 "DeepSeek-V3" (arXiv:2412.19437, section 2.1.2).

Every token reaches all of its experts: nothing is dropped. A token's output does not depend on the other tokens, and
the sum over its k experts has one order, that of ``ids``.

Shapes: B samples, S tokens, N = B S, D hidden, E experts, k experts of a token, R = N k rows, F ffn size of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.models.expert_balance import Balance, add_loss, count_tokens, loss_sum
from meshwright.models.feed_forward import Activation
from meshwright.models.row_order import FromExperts, ToExperts

SCORES = ("softmax", "sigmoid")
GROUP_SCORES = {"max": 1, "top2": 2}
"""Name of a group's score -> how many of its highest scores are added up: DeepSeek-V2's, DeepSeek-V3's."""
ALIGNMENT = 16
"""Bytes that divide a row of a matrix of a grouped product."""


class Routing(NamedTuple):
    """Choice of the experts of a token, and their weights."""

    num_experts: int
    top_k: int
    scores: str = "softmax"
    """Function of the logits: "softmax" over the experts, or "sigmoid" of each."""
    normalise: bool = True
    """The weights of a token's experts are divided by their sum."""
    scaling: float = 1.0
    """Factor on the weights, after they are normalised."""
    num_groups: int = 1
    """Groups of neighbouring experts."""
    groups_per_token: int = 1
    """Groups that a token's experts may come from, those of the highest score."""
    group_score: str = "top2"
    """Score of a group: its highest score ("max"), or the sum of its two highest ("top2")."""
    has_bias: bool = False
    """A buffer is added to the scores for the choice, and not to the weights (DeepSeek-V3, section 2.1.2)."""


class Router(nn.Module):
    """Linear scores of the experts, and the k experts of each token: (B, S, D) -> ids and weights, each (B, S, k).

    ``weight`` is (E, D). Logits, scores and weights are float32 at least, whatever the dtype of x. ``bias`` (E,), a
    buffer, keeps its dtype when the model is cast. ``counts`` (E,) int64 adds up the tokens of each expert until
    :meth:`end_step`; it is zero between steps and not persistent.

    Under parallelism the framework sets two attributes: ``gradient_scale``, the factor of a loss in the objective, and
    ``sum_tokens``, a sum of counts over the ranks with other tokens of the same samples.
    """

    bias: Tensor | None
    counts: Tensor

    def __init__(self, hidden_size: int, routing: Routing, balance: Balance | None = None) -> None:
        super().__init__()
        self.routing = routing
        self.balance = balance
        self.gradient_scale = 1.0
        self.sum_tokens: Callable[[Tensor], Tensor] = unchanged
        self.step_sums = ("counts",) if balance is not None else ()
        self.couples_samples = balance is not None and balance.batch_loss != 0.0
        if balance is not None:
            self.register_buffer("counts", torch.zeros(routing.num_experts, dtype=torch.int64, device="cpu"), False)
        self.weight = nn.Parameter(torch.empty(routing.num_experts, hidden_size))
        self.register_buffer("bias", torch.zeros(routing.num_experts, device="cpu") if routing.has_bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight as ``nn.Linear`` does."""
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Choose experts. x: (..., D). Return ids (..., k) int64, of the highest score first, and weights (..., k).

        Of experts with equal scores the one with the lowest id comes first.
        """
        logits = self.logits(x)
        scores = self.scores(logits)
        ids, weights = self.choose(scores)
        if self.balance is not None and self.training:
            with torch.no_grad():
                self.counts += count_tokens(ids.unsqueeze(0), self.routing.num_experts)[0]
            if self.balance.has_losses and weights.requires_grad:
                added = loss_sum(self.balance, logits, scores, ids, self.sum_tokens)
                weights = add_loss(weights, added, lambda: self.gradient_scale)
        return ids, weights

    def end_step(self) -> None:
        """Update the bias by the counts of a step, and begin to count anew. After each step of the optimizer."""
        if self.bias is not None and self.balance is not None:
            counts = self.counts.double()
            self.bias += (self.balance.bias_rate * (counts.mean() - counts).sign()).to(self.bias.dtype)
        self.counts.zero_()

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits (..., E), float32 at least. x: (..., D)."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        return F.linear(x.to(dtype), self.weight.to(dtype))

    def scores(self, logits: Tensor) -> Tensor:
        """Return the scores of logits, both (..., E)."""
        return logits.softmax(-1) if self.routing.scores == "softmax" else logits.sigmoid()

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids and weights, each (..., k), of scores (..., E)."""
        routing = self.routing
        ids = self._highest(scores.detach())
        weights = scores.gather(-1, ids)
        if routing.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return ids, weights * routing.scaling if routing.scaling != 1 else weights

    def _highest(self, scores: Tensor) -> Tensor:
        """Return the ids (..., k) of the highest scores (..., E), bias added, in the chosen groups."""
        scores, _ = self._selectable(scores)
        return scores.argsort(dim=-1, descending=True, stable=True)[..., : self.routing.top_k]

    def _selectable(self, scores: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the scores (..., E) for the choice, -inf outside the chosen groups, and those of groups (..., G)."""
        routing = self.routing
        if self.bias is not None:
            scores = scores + self.bias
        if routing.groups_per_token == routing.num_groups:
            return scores, None
        grouped = scores.unflatten(-1, (routing.num_groups, -1))  # (..., groups, E / groups)
        of_groups = grouped.topk(GROUP_SCORES[routing.group_score], dim=-1).values.sum(-1)
        chosen = of_groups.argsort(dim=-1, descending=True, stable=True)[..., : routing.groups_per_token]
        is_chosen = torch.zeros_like(of_groups, dtype=torch.bool).scatter(-1, chosen, True)
        return grouped.masked_fill(~is_chosen.unsqueeze(-1), -torch.inf).flatten(-2), of_groups

    @torch.no_grad()
    def choice_gap(self, x: Tensor) -> Tensor:
        """Return the least difference between the last chosen score and the next, over tokens, (). x: (..., D).

        Of experts, and of groups. An error of that size in x could change a choice; infinity where nothing is left out.
        """
        scores, of_groups = self._selectable(self.scores(self.logits(x)))
        gap = least_gap(scores, self.routing.top_k)
        return gap if of_groups is None else torch.minimum(gap, least_gap(of_groups, self.routing.groups_per_token))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """Move with the module between devices, but keep the dtype of the bias."""
        bias = self.bias
        super()._apply(fn, recurse)
        if bias is not None and self.bias is not None and self.bias.dtype != bias.dtype:
            self.bias = bias.to(self.bias.device)
        return self


def least_gap(scores: Tensor, num_chosen: int) -> Tensor:
    """Return the least difference of the scores at ``num_chosen`` - 1 and ``num_chosen``, highest first. (..., n)."""
    if num_chosen >= scores.shape[-1]:
        return scores.new_full((), torch.inf)
    ordered = scores.sort(dim=-1, descending=True).values
    return (ordered[..., num_chosen - 1] - ordered[..., num_chosen]).min()


def unchanged(counts: Tensor) -> Tensor:
    """Return the counts of a rank that has all tokens of its samples."""
    return counts


class Experts(nn.Module):
    """Gated feed-forward networks, one for each expert: down(activation(gate(x)) * up(x)).

    ``gate_up`` (E, 2F, D), the F rows of the gate first, and ``down`` (E, D, F), as in transformers. E is read from
    their shapes, so that a slice along dim 0 is again a module of experts. ``meta_device``: type of the device that
    tensors on meta stand for, such as "cuda".
    """

    def __init__(self, num_experts: int, hidden_size: int, ffn_size: int, *, activation: Activation) -> None:
        super().__init__()
        self.activation = activation
        self.meta_device = ""
        self.gate_up = nn.Parameter(torch.empty(num_experts, 2 * ffn_size, hidden_size))
        self.down = nn.Parameter(torch.empty(num_experts, hidden_size, ffn_size))
        self.fused_rows = {"gate_up": (ffn_size, ffn_size)}  # of an optimizer of matrices: gate and up are two
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights of each expert as ``nn.Linear`` does."""
        for weight in (self.gate_up, self.down):
            nn.init.uniform_(weight, -(weight.shape[-1] ** -0.5), weight.shape[-1] ** -0.5)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the weighted sum over each token's experts, (..., D) in the dtype of x.

        x: (..., D); ids: (..., k) int64 in 0 .. E - 1; weights: (..., k), None for a sum without weights. Rows of one
        expert are in the order of the tokens.
        """
        top_k, hidden_size = ids.shape[-1], x.shape[-1]
        chosen = ids.reshape(-1)
        order = chosen.argsort(stable=True)  # (R,)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
        rows: Tensor = ToExperts.apply(x.reshape(-1, hidden_size), order, inverse, top_k)
        y: Tensor = FromExperts.apply(self._by_expert(rows, chosen), order, inverse)
        y = y.view(*ids.shape, hidden_size)
        if weights is not None:
            y = y * weights.unsqueeze(-1)
        return (y.sum(-2) if top_k > 1 else y.squeeze(-2)).to(x.dtype)

    def _by_expert(self, rows: Tensor, chosen: Tensor) -> Tensor:
        """Apply its expert to each row. rows: (R, D), sorted by expert; chosen: (R,) ids in any order. Return (R, D).

        One grouped product for all experts in bfloat16 on CUDA, otherwise a loop over the experts.
        """
        num_experts = self.gate_up.shape[0]
        if self.can_group(rows):
            counts = chosen.new_zeros(num_experts).scatter_add_(0, chosen, torch.ones_like(chosen))
            ends = counts.cumsum(0).to(torch.int32)  # bincount would wait for the device
            gate, up = F.grouped_mm(rows, self.gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
            return F.grouped_mm(self.activation(gate) * up, self.down.transpose(1, 2), offs=ends)
        return self._in_turn(rows, chosen)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _in_turn(self, rows: Tensor, chosen: Tensor) -> Tensor:
        """Apply its expert to each row, expert by expert. Never compiled: numbers of rows are new in every call."""
        parts = rows.split(rows_of(chosen, self.gate_up.shape[0]))
        found = []  # an expert without rows computes too: its gradient is zero, not None
        for part, gate_up, down in zip(parts, self.gate_up.unbind(), self.down.unbind(), strict=True):
            gate, up = F.linear(part, gate_up).chunk(2, -1)
            found.append(F.linear(self.activation(gate) * up, down))
        return torch.cat(found)

    def can_group(self, rows: Tensor) -> bool:
        """Return whether torch has a grouped product for the rows (R, D) and these weights."""
        device = self.meta_device if rows.is_meta else rows.device.type
        fits = device == "cuda" and rows.dtype == self.gate_up.dtype == torch.bfloat16 and type(rows) is Tensor
        return fits and not any(size * 2 % ALIGNMENT for size in (*self.down.shape[1:], self.gate_up.shape[1] // 2))

    def extra_repr(self) -> str:
        return f"{self.gate_up.shape[0]} experts, {self.down.shape[1]} -> {self.down.shape[2]} -> {self.down.shape[1]}"


def rows_of(chosen: Tensor, num_experts: int) -> list[int]:
    """Return the number of rows of each expert. chosen: (R,) int64, the expert of each row.

    Fake tensors and those on meta have no values: the rows are then shared out evenly, the rest to the first experts.
    """
    if type(chosen) is not Tensor or chosen.is_meta:
        each, rest = divmod(chosen.shape[0], num_experts)
        return [each + (expert < rest) for expert in range(num_experts)]
    counts: list[int] = chosen.bincount(minlength=num_experts).tolist()
    return counts


class MoE(nn.Module):
    """Mixture of experts as the feed-forward network of a block, (B, S, D) -> (B, S, D).

    Args:
        shared: feed-forward network that every token passes, added to the experts' output.
        shared_gate: linear from D to 1 feature, whose sigmoid multiplies the shared network's output (Qwen2-MoE).
    """

    def __init__(
        self, router: Router, experts: Experts, shared: nn.Module | None = None, shared_gate: nn.Linear | None = None
    ) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self.shared = shared
        self.shared_gate = shared_gate
        self.fused_rows = {"router": "adamw"}  # of an optimizer of matrices: the router is stepped by AdamW

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.router(x)
        y: Tensor = self.experts(x, ids, weights)
        if self.shared is None:
            return y
        shared: Tensor = self.shared(x)
        return y + (shared if self.shared_gate is None else self.shared_gate(x).sigmoid() * shared)
