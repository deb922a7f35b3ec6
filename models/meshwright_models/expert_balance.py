"""Balance of the experts' load: auxiliary losses and the bias update of a router, in plain torch.

    bias           each step adds rate for experts with fewer tokens than the mean of the global batch, and subtracts it
                   for those with more (DeepSeek-V3, arXiv:2412.19437, section 2.1.2)
    sequence loss  sum over e of f_e P_e of each sample, f_e = E / (k T) x its tokens that chose e,
    P_e the mean of the
                   normalised scores (the same, equations 17 to 20)
    batch loss     E x sum over e of f_e P_e of each micro-batch, f_e = tokens that chose e / T (Fedus et al. 2021,
                   "Switch Transformers", equations 4 to 6; Mixtral and OLMoE, for each layer by
                   itself)
    z-loss         mean over the tokens of logsumexp(logits)^2 (Zoph et al. 2022, "ST-MoE", equation 5)

Each loss is counted once per token, as the label's loss is: the objective of a step is (sum of the
labels' losses + sum over tokens of coefficient x loss) / labels that count. So it does not depend
on how samples are grouped into micro-batches and ranks, except for the batch loss, which is defined
on a micro-batch.

No layer returns these losses: :class:`AddLoss` adds their gradient in backward of the router's
weights. By default it is that of their sum; a loop that divides its loss by n sets
``router.gradient_scale = 1 / n``.

Shapes: B samples, S tokens, T tokens of a sample or micro-batch, E experts, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Balance(NamedTuple):
    """Options of the balance. A coefficient of 0 turns its loss off."""

    bias_rate: float = 0.0
    """Change of the bias per step."""
    sequence_loss: float = 0.0
    batch_loss: float = 0.0
    z_loss: float = 0.0
    counts: bool = False
    """Count the tokens of each expert even if bias and losses are off."""

    @property
    def has_losses(self) -> bool:
        """True if a loss is added in training."""
        return any((self.sequence_loss, self.batch_loss, self.z_loss))


class AddLoss(torch.autograd.Function):
    """Identity of ``tensor`` whose backward also gives ``loss_sum`` the gradient ``scale()``."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss_sum: Tensor, scale: Callable[[], float]) -> Tensor:
        ctx.scale, ctx.like = scale, loss_sum.detach()
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradients[0], torch.full_like(ctx.like, ctx.scale()), None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def add_loss(weights: Tensor, loss: Tensor, scale: Callable[[], float]) -> Tensor:
    """Return the weights; backward adds ``scale()`` times the gradient of ``loss`` ().
    Not compiled: scale changes.
    """
    added: Tensor = AddLoss.apply(weights, loss, scale)
    return added


def count_tokens(ids: Tensor, num_experts: int) -> Tensor:
    """Return the number of tokens of each expert, (B, E) int64, of ids (B, ..., k)."""
    chosen = ids.reshape(ids.shape[0], -1)
    zeros = torch.zeros((ids.shape[0], num_experts), dtype=torch.int64, device=ids.device)
    return zeros.scatter_add_(1, chosen, torch.ones_like(chosen))


def loss_sum(
    balance: Balance,
    logits: Tensor,
    scores: Tensor,
    ids: Tensor,
    sum_tokens: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return the sum over these tokens of coefficient x loss, ().
    Counts of tokens are constants in backward.

    Args:
        logits: (B, S, E). scores: (B, S, E), of softmax or sigmoid. ids: (B, S, k).
        sum_tokens: sums integer counts (B, E) over the ranks that have other tokens of the same
            samples.
    """
    num_experts, top_k = scores.shape[-1], ids.shape[-1]
    total = logits.new_zeros(())
    if balance.z_loss:
        total = total + balance.z_loss * logits.logsumexp(-1).square().sum()
    if not (balance.sequence_loss or balance.batch_loss):
        return total
    # (B, E): T x P_e, of these tokens
    shares = (scores / scores.sum(-1, keepdim=True)).flatten(1, -2).sum(1)
    with torch.no_grad():
        counts = sum_tokens(count_tokens(ids, num_experts)).to(shares.dtype)
        # E / (k T) x tokens of a sample
        of_samples = num_experts * counts / counts.sum(-1, keepdim=True)
        of_batch = num_experts * top_k * counts.sum(0) / counts.sum()
    if balance.sequence_loss:
        total = total + balance.sequence_loss * (of_samples * shares).sum()
    if balance.batch_loss:
        total = total + balance.batch_loss * (of_batch * shares).sum()
    return total
