"""Options of the feed-forward networks of a decoder: dense,
or a mixture of experts from some block on.

``model.options.moe`` of Llama is a table with the fields of :class:`MoeOptions`::

    [model.options.moe]
    num_experts = 64
    top_k = 8
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import nn

from meshwright_models.expert_balance import Balance
from meshwright_models.experts import Experts, MoE
from meshwright_models.feed_forward import GatedMlp
from meshwright_models.option_tables import read_table
from meshwright_models.router import GROUP_SCORES, SCORES, Router, Routing

BALANCES = ("none", "bias")
LOSSES = ("sequence_loss", "batch_loss", "router_z_loss")
NOT_NEGATIVE = ("shared_ffn_size", "first_dense", "count_tokens", "capacity_factor", *LOSSES)
"""Options that may be 0."""


class MoeOptions(NamedTuple):
    """Mixture of experts of a decoder's blocks."""

    num_experts: int
    top_k: int
    """Experts of a token."""
    expert_ffn_size: int | None = None
    """ffn size of one expert. None: ``ffn_size``."""
    shared_ffn_size: int = 0
    """ffn size of the network that every token passes beside its experts; 0: there is none."""
    shared_gate: bool = False
    """A learned gate, one number for each token, multiplies the output of the shared network."""
    first_dense: int = 0
    """Blocks before the first mixture of experts: their feed-forward network is dense,
    of ``ffn_size``.
    """
    router: str = "softmax"
    """Scores of the experts: "softmax" or "sigmoid"."""
    normalise: bool = True
    """A token's weights add up to 1, times ``scaling``."""
    scaling: float = 1.0
    num_groups: int = 1
    groups_per_token: int = 1
    group_score: str = "top2"
    """See :class:`~meshwright_models.router.Routing`, for these three."""
    balance: str = "none"
    """"bias": a buffer of the router is added to the scores for the choice (DeepSeek-V3)."""
    bias_rate: float = 0.001
    """Change of the bias per step."""
    sequence_loss: float = 0.0
    batch_loss: float = 0.0
    router_z_loss: float = 0.0
    """Coefficients of losses that are added in training,
    see :mod:`~meshwright_models.expert_balance`; 0: none.
    """
    count_tokens: bool = False
    """The tokens of each expert are counted and recorded; with any balance,
    loss or capacity they are anyway.
    """
    capacity_factor: float = 0.0
    """In training an expert takes at most this many times k S / E tokens of a sample; 0:
    no token is dropped.
    """

    def check(self, ffn_size: int, num_layers: int) -> None:
        """Raise ValueError for options that are out of range,
        contradict each other or have no effect.
        """
        problems = [
            f"{name}={value} must be positive"
            for name, value in self._asdict().items()
            if type(value) in (int, float) and value <= 0 and name not in NOT_NEGATIVE
        ]
        problems += [
            f"{name}={value} must not be negative"
            for name in LOSSES
            if (value := getattr(self, name)) < 0
        ]
        dropless = self.num_experts / max(self.top_k, 1)
        if self.capacity_factor and not 0 < self.capacity_factor < dropless:
            problems.append(
                f"capacity_factor={self.capacity_factor} must be positive and below num_experts /"
                " top_k = "
            )
            problems[-1] += f"{dropless:g}, from which on nothing is dropped; 0 turns it off"
        if self.top_k > self.num_experts:
            problems.append(
                f"top_k={self.top_k} of num_experts={self.num_experts}: at most all of them"
            )
        if self.shared_ffn_size < 0 or not 0 <= self.first_dense < num_layers:
            problems.append(
                f"shared_ffn_size={self.shared_ffn_size}, first_dense={self.first_dense}: at least"
                " 0, and "
            )
            problems[-1] += f"first_dense below num_layers={num_layers}"
        if self.shared_gate and not self.shared_ffn_size:
            problems.append("shared_gate=True without a shared network: set shared_ffn_size")
        if not self.first_dense and self.expert_ffn_size not in (None, ffn_size):
            problems.append(
                f"expert_ffn_size={self.expert_ffn_size} and no dense block has"
                f" ffn_size={ffn_size}: "
            )
            problems[-1] += "give the experts' size as ffn_size, and leave expert_ffn_size out"
        for name, value, allowed in (
            ("router", self.router, SCORES),
            ("group_score", self.group_score, tuple(GROUP_SCORES)),
            ("balance", self.balance, BALANCES),
        ):
            if value not in allowed:
                problems.append(f"{name}={value!r} must be one of {', '.join(allowed)}")
        if not problems:
            problems += self._group_problems()
        if problems:
            raise ValueError(f"moe: {'; '.join(problems)}")

    def _group_problems(self) -> list[str]:
        num_groups, each = self.num_groups, self.num_experts // self.num_groups
        if self.num_experts % num_groups or self.groups_per_token > num_groups:
            return [
                f"num_groups={num_groups} of num_experts={self.num_experts},"
                f" groups_per_token={self.groups_per_token}: the groups divide the experts, and a"
                " token has at most all of them"
            ]
        if num_groups > 1 and (
            each < GROUP_SCORES[self.group_score] or self.groups_per_token * each < self.top_k
        ):
            return [
                f"{self.groups_per_token} groups of {each} experts are too small for"
                f" top_k={self.top_k} and group_score={self.group_score!r}"
            ]
        return []

    def routing(self) -> Routing:
        """Return the router's :class:`Routing` that the options describe."""
        groups = self.num_groups, self.groups_per_token, self.group_score
        chosen = self.num_experts, self.top_k, self.router, self.normalise, self.scaling
        return Routing(*chosen, *groups, self.balance == "bias", self.capacity_factor)

    def balancing(self) -> Balance | None:
        """Return the balance that the options describe; None: nothing is added or counted."""
        rate, counts = (
            self.bias_rate if self.balance == "bias" else 0.0,
            self.count_tokens or self.capacity_factor > 0,
        )
        found = Balance(rate, self.sequence_loss, self.batch_loss, self.router_z_loss, counts)
        return found if any(found) else None


def moe_of(options: Mapping[str, Any] | str | None) -> MoeOptions | None:
    """Return the options of a table ``moe``; None, or "none" of a command line:
    every block is dense.

    Raises:
        ValueError: an option is unknown, missing, of another type, or has no effect.
    """
    if options is None or options == "none":
        return None
    moe = read_table("moe", options, MoeOptions)
    if "bias_rate" in options and moe.balance != "bias":
        raise ValueError(
            f'moe: bias_rate={moe.bias_rate} has no effect without balance="bias": leave it out'
        )
    return moe


class FeedForwards(NamedTuple):
    """Feed-forward networks of a decoder with a gated activation (SwiGLU)."""

    hidden_size: int
    ffn_size: int
    num_kv_heads: int
    """The blocks of gate and up rows, which tp divides, number gcd(ffn size, num_kv_heads)."""
    bias: bool = False
    moe: MoeOptions | None = None

    def build(self, index: int) -> nn.Module:
        """Build the network of a block, (B, S, D) -> (B, S, D). ``index``: its number from 0."""
        moe = self.moe
        if moe is None or index < moe.first_dense:
            return self._gated(self.ffn_size)
        router = Router(self.hidden_size, moe.routing(), moe.balancing())
        experts = Experts(
            moe.num_experts,
            self.hidden_size,
            moe.expert_ffn_size or self.ffn_size,
            activation=F.silu,
        )
        experts.may_drop = moe.capacity_factor > 0
        shared = self._gated(moe.shared_ffn_size) if moe.shared_ffn_size else None
        return MoE(
            router,
            experts,
            shared,
            nn.Linear(self.hidden_size, 1, bias=False) if moe.shared_gate else None,
        )

    def sharding_plan(self) -> dict[str, str]:
        """Return the sharding plan of the networks."""
        plan: dict[str, str] = {}
        if self.moe is None or self.moe.first_dense:
            plan |= {"block*.mlp.gate_up": "column", "block*.mlp.down": "row"}
        if self.moe is not None:
            plan |= {"block*.mlp.router": "router", "block*.mlp.experts": "experts"}
            if self.moe.shared_ffn_size:
                plan |= {"block*.mlp.shared.gate_up": "column", "block*.mlp.shared.down": "row"}
        return plan

    def units(self) -> dict[str, int]:
        """Return the indivisible units of each split linear, by its name in a block."""
        units = {"mlp.gate_up": self._num_blocks(self.ffn_size), "mlp.down": self.ffn_size}
        if self.moe is not None and self.moe.shared_ffn_size:
            size = self.moe.shared_ffn_size
            units |= {"mlp.shared.gate_up": self._num_blocks(size), "mlp.shared.down": size}
        return units

    def _num_blocks(self, ffn_size: int) -> int:
        # a larger tp shares blocks, as it shares kv heads
        return math.gcd(ffn_size, self.num_kv_heads)

    def _gated(self, ffn_size: int) -> GatedMlp:
        return GatedMlp(
            self.hidden_size,
            ffn_size,
            self._num_blocks(ffn_size),
            activation=F.silu,
            bias=self.bias,
        )


def feed_forwards_of(options: Mapping[str, Any]) -> FeedForwards:
    """Return the feed-forward networks that a builder's options describe.

    Raises:
        ValueError: options of the experts do not fit each other, or an option that experts do not
            have is set too.
    """
    moe = moe_of(options["moe"])
    if moe is not None:
        moe.check(options["ffn_size"], options["num_layers"])
        others = [name for name in ("mup_base_size", "mlp_bias") if options[name]]
        if others:
            raise ValueError(
                f"moe with {others[0]}={options[others[0]]}, which experts do not have: leave"
                " one out"
            )
    sizes = options["hidden_size"], options["ffn_size"], options["num_kv_heads"]
    return FeedForwards(*sizes, bias=options["mlp_bias"], moe=moe)
