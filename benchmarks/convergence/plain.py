"""Plain torch: Hugging Face's Llama in a loop written by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from task import Result, Task, Windows, first_weights, hugging_face_config
from torch import Tensor, nn


def llama(task: Task, seed: int) -> nn.Module:
    """Return Hugging Face's Llama with the first weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    fields = {
        k: v for k, v in hugging_face_config(task).items() if k not in ("model_type", "torch_dtype")
    }
    model = LlamaForCausalLM(LlamaConfig(**fields, attn_implementation="sdpa")).float()
    model.load_state_dict(first_weights(task, seed))
    return model


def rate(task: Task, step: int) -> float:
    """Return the learning rate of a step, counted from 0: linear warm-up, then half a cosine."""
    if step < task.warmup_steps:
        return task.learning_rate * (step + 1) / task.warmup_steps
    share = (step - task.warmup_steps + 1) / (task.steps - task.warmup_steps)
    low = task.min_learning_rate
    return low + (task.learning_rate - low) * 0.5 * (1.0 + math.cos(math.pi * share))


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss over all tokens. logits: (B, S, V); labels: (B, S)."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Return the optimizer's groups: vectors do not decay."""
    weights = list(model.parameters())
    return [
        {"params": [each for each in weights if each.dim() >= 2], "weight_decay": weight_decay},
        {"params": [each for each in weights if each.dim() < 2], "weight_decay": 0.0},
    ]


def train(
    task: Task,
    corpus: Path,
    seed: int,
    rates: Sequence[float] = (),
    weight_decay_of_vectors: bool = False,
    exact_norm: bool = False,
) -> Result:
    """Train with the loop that one writes by hand.

    Args:
        rates: learning rate of each step; empty: :func:`rate`.
        weight_decay_of_vectors: decay the weights of norms too, as torchtitan does.
        exact_norm: sum the squares of the gradient norm in float64. torch's kernel for a CPU sums them in
            float32, and loses 1e-5 of the norm here.
    """
    model = llama(task, seed)
    logits_of = lambda tokens: model(input_ids=tokens, use_cache=False).logits  # noqa: E731
    groups = decay_groups(model, task.weight_decay)
    if weight_decay_of_vectors:
        groups[1]["weight_decay"] = task.weight_decay
    optimizer = torch.optim.AdamW(groups, lr=task.learning_rate, betas=task.betas, eps=task.eps)
    windows = Windows(corpus, "train", task, seed)
    taken = list(rates) or [rate(task, step) for step in range(task.steps)]
    losses = []
    for step in range(task.steps):
        losses.append(accumulate(task, windows, step, logits_of))
        clip = clip_by_exact_norm if exact_norm else torch.nn.utils.clip_grad_norm_
        clip(model.parameters(), task.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = taken[step]
        optimizer.step()
        optimizer.zero_grad()
    return Result(losses, taken, validate(task, corpus, logits_of))


@torch.no_grad()
def clip_by_exact_norm(weights: Iterable[Tensor], clip_norm: float) -> None:
    """Clip as ``clip_grad_norm_`` does, by a norm whose squares are summed in float64."""
    gradients = [each.grad for each in weights if each.grad is not None]
    norm = sum(float(each.double().square().sum()) for each in gradients) ** 0.5
    for gradient in gradients:
        gradient.mul_(min(1.0, clip_norm / (norm + 1e-6)))


def accumulate(
    task: Task, windows: Windows, step: int, logits_of: Callable[[Tensor], Tensor]
) -> float:
    """Accumulate the gradients of a step's micro-batches; return their mean loss."""
    total = 0.0
    for chunk in range(task.chunks):
        start = step * task.global_batch + chunk * task.micro_batch_size
        tokens, labels = windows.batch(start, task.micro_batch_size)
        loss = cross_entropy(logits_of(tokens), labels) / task.chunks
        loss.backward()
        total += float(loss.detach())
    return total


@torch.no_grad()
def validate(task: Task, corpus: Path, logits_of: Callable[[Tensor], Tensor]) -> float:
    """Return the mean loss of the validation samples."""
    windows = Windows(corpus, "validation", task, 0)
    size = task.global_batch
    starts = range(0, len(windows), size)
    batches = (windows.batch(start, size) for start in starts)
    losses = [float(cross_entropy(logits_of(tokens), labels)) for tokens, labels in batches]
    return sum(losses) / len(losses)
