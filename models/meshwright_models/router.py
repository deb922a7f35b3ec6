"""Router of a mixture of experts: scores of the experts, the k experts of each token,
and their weights.

    x --> logits --> scores --> choice (bias, groups, top k) --> route_ids --> weights --> capacity --> ids, weights

All chosen ids pass through ``route_ids``, and the mask of those within a capacity through
``route_kept``: there a recording copies them, and a replay replaces them. The weights always come
from the router's own scores, and so does its gradient.

Shapes: B samples, S tokens, D hidden, E experts, k experts of a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright_models.equal_scores import OF_TOKENS, choice_gap, highest
from meshwright_models.expert_balance import Balance, add_loss, count_tokens, loss_sum
from meshwright_models.expert_capacity import capacity_gap, capacity_of, within_capacity

SCORES = ("softmax", "sigmoid")
GROUP_SCORES = {"max": 1, "top2": 2}
"""Value of ``group_score`` -> number of a group's highest scores that add up to its own:
DeepSeek-V2's, -V3's.
"""


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
    """Number of groups of consecutive experts."""
    groups_per_token: int = 1
    """Groups that a token's experts may come from, those of the highest score."""
    group_score: str = "top2"
    """Score of a group: its highest score ("max"), or the sum of its two highest ("top2")."""
    has_bias: bool = False
    """A buffer is added to the scores for the choice, and not to the weights (DeepSeek-V3,
    section 2.1.2).
    """
    capacity_factor: float = 0.0
    """In training an expert takes at most this many times k S / E tokens of a sample; 0: all.
    See expert_capacity.
    """


class Router(nn.Module):
    """Linear scores of the experts, and the k experts of each token: (B, S, D) -> ids and weights,
    each (B, S, k).

    ``weight`` is (E, D). Logits, scores and weights are float32 at least, whatever the dtype of x.
    ``bias`` (E,), a buffer, keeps its dtype when the model is cast. Buffers that add up until
    :meth:`end_step`, zero between steps and not persistent: ``counts`` (E,) int64, tokens that
    chose each expert; ``dropped`` (E,) int64, those of them beyond its capacity; ``entropy`` (2,)
    float64, the entropy of the scores relative to log E, and the number of tokens.

    Under parallelism the framework sets four attributes: ``gradient_scale``, the factor of a loss
    in the objective; ``sum_tokens``, a sum of counts over the ranks with other tokens of the same
    samples; ``whole_samples``, which gathers the tokens of these ranks, (B, n, ...) -> (B, S, ...),
    and ``own_tokens``, which takes this rank's of them. ``route_ids`` maps the chosen ids (B, S, k)
    to those to use, and ``route_kept`` the mask (B, S, k) bool of the choices within capacity to
    the one to use: the identity, or a recording or replay.
    """

    bias: Tensor | None
    counts: Tensor
    dropped: Tensor
    entropy: Tensor

    def __init__(self, hidden_size: int, routing: Routing, balance: Balance | None = None) -> None:
        super().__init__()
        self.routing = routing
        self.balance = balance
        self.gradient_scale = 1.0
        self.sum_tokens: Callable[[Tensor], Tensor] = unchanged
        self.whole_samples: Callable[[Tensor], Tensor] = unchanged
        self.own_tokens: Callable[[Tensor], Tensor] = unchanged
        self.route_ids: Callable[[Tensor], Tensor] = unchanged
        self.route_kept: Callable[[Tensor], Tensor] = unchanged
        self.step_sums: tuple[str, ...] = ()
        self.couples_samples = balance is not None and balance.batch_loss != 0.0
        if balance is not None:
            self._add_sum(
                "counts", torch.zeros(routing.num_experts, dtype=torch.int64, device="cpu")
            )
            self._add_sum("entropy", torch.zeros(2, dtype=torch.float64, device="cpu"))
        if routing.capacity_factor:
            self._add_sum(
                "dropped", torch.zeros(routing.num_experts, dtype=torch.int64, device="cpu")
            )
        self.weight = nn.Parameter(torch.empty(routing.num_experts, hidden_size))
        self.register_buffer(
            "bias", torch.zeros(routing.num_experts, device="cpu") if routing.has_bias else None
        )
        self.reset_parameters()

    def _add_sum(self, name: str, zeros: Tensor) -> None:
        self.step_sums += (name,)
        self.register_buffer(name, zeros, persistent=False)

    def reset_parameters(self) -> None:
        """Draw the weight as ``nn.Linear`` does."""
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Choose experts. x: (..., D). Return ids (..., k) int64, of the highest score first,
        and weights (..., k).

        Of experts whose scores count as equal at the last place, those with the lowest ids are
        chosen (equal_scores).
        """
        logits = self.logits(x)
        scores = self.scores(logits)
        ids, weights = self.choose(scores)
        if self.balance is not None and self.training:
            with torch.no_grad():
                self.counts += count_tokens(ids.unsqueeze(0), self.routing.num_experts)[0]
                self.entropy += entropy_sum(scores)
            if self.balance.has_losses and weights.requires_grad:
                added = loss_sum(self.balance, logits, scores, ids, self.sum_tokens)
                weights = add_loss(weights, added, lambda: self.gradient_scale)
        if self.routing.capacity_factor and self.training:
            return self._limit(ids, weights, scores, OF_TOKENS[x.dtype])
        return ids, weights

    def _limit(
        self, ids: Tensor, weights: Tensor, scores: Tensor, tolerance: float
    ) -> tuple[Tensor, Tensor]:
        """Return ids and weights, both (B, S, k),
        with id E and weight 0 where an expert is beyond its capacity.

        ``tolerance``: relative, of scores that count as equal.
        """
        num_experts, top_k = self.routing.num_experts, self.routing.top_k
        with torch.no_grad():
            # one message: float32 holds an id exactly
            whole = self.whole_samples(
                torch.cat([scores.gather(-1, ids), ids.to(scores.dtype)], dim=-1)
            )
            of_scores, of_ids = whole[..., :top_k], whole[..., top_k:].to(torch.int64)
            capacity = capacity_of(self.routing.capacity_factor, top_k, whole.shape[1], num_experts)
            is_kept = self.own_tokens(
                within_capacity(of_ids, of_scores, num_experts, capacity, tolerance)
            )
            is_kept = self.route_kept(is_kept)
            lost = ids.masked_fill(is_kept, num_experts)
            self.dropped += count_tokens(lost.unsqueeze(0), num_experts + 1)[0, :num_experts]
        return ids.masked_fill(~is_kept, num_experts), weights * is_kept

    def end_step(self) -> None:
        """Update the bias from the counts of the step, then reset the counts.
        Call it after each optimizer step.

        The bias of a frozen router, such as one under adapters, stays as it is.
        """
        if self.bias is not None and self.balance is not None and self.weight.requires_grad:
            # integers: an expert with exactly the mean load is one with a difference of 0, on every
            # device
            below_mean = self.counts.sum() - self.counts.numel() * self.counts
            self.bias += (self.balance.bias_rate * below_mean.sign().double()).to(self.bias.dtype)
        for name in self.step_sums:
            self.get_buffer(name).zero_()

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
        ids = self.route_ids(self._highest(scores.detach()))
        weights = scores.gather(-1, ids)
        if routing.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return ids, weights * routing.scaling if routing.scaling != 1 else weights

    def _highest(self, scores: Tensor) -> Tensor:
        """Return the ids (..., k) of the highest scores (..., E), bias added,
        in the chosen groups.
        """
        scores, _ = self._selectable(scores)
        return highest(scores, self.routing.top_k, self._largest_bias())

    def _largest_bias(self) -> Tensor | float:
        return 0.0 if self.bias is None else self.bias.abs().max()

    def _selectable(self, scores: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the scores (..., E) for the choice, -inf outside the chosen groups,
        and those of groups (..., G).
        """
        routing = self.routing
        if self.bias is not None:
            scores = scores + self.bias
        if routing.groups_per_token == routing.num_groups:
            return scores, None
        grouped = scores.unflatten(-1, (routing.num_groups, -1))  # (..., groups, E / groups)
        of_groups = grouped.topk(GROUP_SCORES[routing.group_score], dim=-1).values.sum(-1)
        chosen = highest(of_groups, routing.groups_per_token, 2 * self._largest_bias())
        is_chosen = torch.zeros_like(of_groups, dtype=torch.bool).scatter(-1, chosen, True)
        return grouped.masked_fill(~is_chosen.unsqueeze(-1), -torch.inf).flatten(-2), of_groups

    @torch.no_grad()
    def choice_gap(self, x: Tensor) -> Tensor:
        """Return the least change of a score that changes a choice, over tokens, (). x: (B, S, D).

        Over the choices of experts, of groups, and of the tokens of an expert at capacity. Infinity
        if all are chosen.
        """
        scores = self.scores(self.logits(x))
        selectable, of_groups = self._selectable(scores)
        gap = choice_gap(selectable, self.routing.top_k, self._largest_bias())
        if of_groups is not None:
            of_group = choice_gap(
                of_groups, self.routing.groups_per_token, 2 * self._largest_bias()
            )
            gap = torch.minimum(gap, of_group)
        if self.routing.capacity_factor and self.training:
            ids = self._highest(scores)
            capacity = capacity_of(
                self.routing.capacity_factor, ids.shape[-1], ids.shape[1], scores.shape[-1]
            )
            of_scores, tolerance = scores.gather(-1, ids), OF_TOKENS[x.dtype]
            gap = torch.minimum(
                gap, capacity_gap(ids, of_scores, scores.shape[-1], capacity, tolerance)
            )
        return gap

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """Move with the module between devices, but keep the dtype of the buffers."""
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            moved = self._buffers[name]
            if buffer is not None and moved is not None and moved.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        return self


def entropy_sum(scores: Tensor) -> Tensor:
    """Return (2,) float64: the sum over tokens of the entropy of their scores (..., E) over log E,
    and their number.

    Scores of sigmoid are divided by their sum first. With one expert the entropy is 0.
    """
    shares = scores / scores.sum(-1, keepdim=True)
    nats = torch.special.entr(shares).sum().double() / math.log(max(2, scores.shape[-1]))
    return torch.stack([nats, torch.full_like(nats, scores.numel() // scores.shape[-1])])


def unchanged(tensor: Tensor) -> Tensor:
    """Return the tensor: default of a router's functions,
    for a rank with all tokens of its samples and no replay.
    """
    return tensor
