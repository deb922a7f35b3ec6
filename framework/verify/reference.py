"""The plain run: one process, the whole model, a Python loop over the samples, torch's own optimizer and clipping.

Nothing of the parallel parts is used here: no stage, schedule, bucket or sharding. Shared with the layouts are only the
definitions of what is to be the same: the builder, initial weights by name, dropout masks by name, the samples, the
learning rate of a step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from framework.config import Optimizer, RunConfig
from framework.data.example import example
from framework.feeds import Source
from framework.model import PlainModel, build_model
from framework.optimizer.eight_bit import AdamW8bit
from framework.optimizer.schedule import learning_rate
from framework.pipeline.running import cast_running, cast_statistics, running_buffers, running_values
from framework.pipeline.values import IGNORED_LABEL, Example, cast_floats


class Findings(NamedTuple):
    """What a run has shown: per step, and per parameter under its canonical name, whole and unpadded, on CPU.

    Running buffers are among the initial values and the weights.
    """

    losses: list[float]
    grad_norms: list[float]
    tokens: list[dict[int, int]]
    """Per step: global sample index -> checksum of its token ids and labels."""
    initial: dict[str, Tensor]
    gradients: dict[str, Tensor]
    """Of step 1, before clipping."""
    weights: dict[str, Tensor]
    """After the last step."""


def checksum(inputs: Any, labels: Tensor) -> int:
    """A number that changes when any token, pixel, label or their order does. All of one sample, on CPU."""
    parts = [leaf.reshape(-1).contiguous() for leaf in (*tree_leaves(inputs), labels)]
    whole = [p.double().view(torch.int64) if p.is_floating_point() else p.to(torch.int64) for p in parts]
    both = torch.cat(whole)
    return int((both * torch.arange(1, both.numel() + 1) * 2654435761).sum())


def plain_layers(model: PlainModel, dtype: torch.dtype) -> nn.Sequential:
    """The whole model with its initial weights, as plain torch; tied weights are one parameter."""
    made: dict[str, nn.Parameter] = {}
    for name, outline in list(model.layers.named_parameters(remove_duplicate=False)):
        canonical = model.canonical(name)
        if canonical not in made:
            made[canonical] = nn.Parameter(model.initial(canonical).to(dtype), requires_grad=outline.requires_grad)
        owner_name, _, attribute = name.rpartition(".")
        model.layers.get_submodule(owner_name)._parameters[attribute] = made[canonical]
    return model.layers


def _loss_sum(model: PlainModel, output: Any, labels: Tensor) -> Tensor:
    """Of the labels that count: the model's own loss, or cross-entropy over the last dim."""
    if model.loss is not None:
        return model.loss(output, labels).sum()
    logits = output if output.dtype == torch.float64 else output.float()
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")


def widened(buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of running buffers on CPU as they are compared: counts in float64."""
    copies = {name: buffer.detach().cpu().clone() for name, buffer in buffers.items()}
    return {name: copy if copy.is_floating_point() else copy.double() for name, copy in copies.items()}


def _optimizer(groups: list[dict[str, Any]], config: Optimizer) -> torch.optim.Optimizer:
    """torch's own, on whole parameters; of the one that it does not have, ours on whole parameters."""
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum, foreach=False)
    options: dict[str, Any] = {"lr": config.learning_rate, "betas": config.betas, "eps": config.eps, "foreach": False}
    if config.name == "adamw8bit":
        narrow = [p for p in groups[0]["params"] if p[0].numel() % config.block_size == 0]
        wide = [p for p in groups[0]["params"] if p[0].numel() % config.block_size]
        both = [{**groups[0], "params": narrow, "eight_bit": True}, {**groups[0], "params": wide}]
        return AdamW8bit([*both, groups[1]], config.block_size, **options)
    return torch.optim.AdamW(groups, **options)


def run_reference(
    config: RunConfig, feed: Source, steps: int, dtype: torch.dtype, micro_batch_size: int = 1
) -> Findings:
    """Train ``steps`` steps plainly. ``config`` is resolved: its global batch is what a step is.

    ``micro_batch_size``: samples that go through the model at once. It changes nothing but where samples see each other
    (BatchNorm).
    """
    global_batch = config.batch.global_batch
    assert global_batch is not None
    model = build_model(config.model.builder, config.model.options, config.run.seed)
    running = running_buffers(model.layers, Example(*example(config, micro_batch_size)).cast(torch.float32).inputs)
    layers = plain_layers(model, dtype)
    cast_running(layers, running, dtype)
    cast_statistics(layers, dtype)
    parameters = {model.canonical(name): p for name, p in layers.named_parameters() if p.requires_grad}
    groups = [
        {"params": [p for p in parameters.values() if p.dim() >= 2], "weight_decay": config.optimizer.weight_decay},
        {"params": [p for p in parameters.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = _optimizer(groups, config.optimizer)
    findings = Findings([], [], [], {name: p.detach().clone() for name, p in parameters.items()}, {}, {})
    findings.initial.update(widened(running_values(layers, running)))
    for step in range(steps):
        checksums: dict[int, int] = {}
        loss_sum = torch.zeros((), dtype=torch.float64)
        num_tokens = 0
        optimizer.zero_grad()
        sums: dict[str, Tensor] = {}
        for index in range(step * global_batch, (step + 1) * global_batch, micro_batch_size):
            inputs, labels, sample_indices = feed.microbatch(index, 0, 1, micro_batch_size, 1, 0)
            for row in range(micro_batch_size):
                checksums[index + row] = checksum(tree_map(lambda leaf, row=row: leaf[row], inputs), labels[row])
            model.draw.sample_indices = sample_indices
            output = layers(cast_floats(inputs, dtype))
            loss = _loss_sum(model, output, cast_floats(labels, dtype))
            loss.backward()  # type: ignore[no-untyped-call]
            loss_sum += loss.detach().double()
            num_tokens += int((labels != IGNORED_LABEL).sum())
            for name, parameter in parameters.items():
                if parameter.grad is not None:  # added up in float32 at least: bfloat16 would lose most of a long sum
                    sums[name] = sums.get(name, 0) + parameter.grad.to(torch.promote_types(dtype, torch.float32))
                    parameter.grad = None
        for name, parameter in parameters.items():
            mean = sums[name] / num_tokens if name in sums else torch.zeros_like(parameter)
            parameter.grad = mean.to(dtype)  # one that nothing uses has a gradient of zero: it is decayed, as with us
            if step == 0:
                findings.gradients[name] = mean.detach().clone()  # clipping is in place
        clip = config.optimizer.clip_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config.optimizer, step, config.train.steps)
        optimizer.step()
        findings.losses.append(float(loss_sum / num_tokens))
        findings.grad_norms.append(float(norm))
        findings.tokens.append(checksums)
    findings.weights.update({name: p.detach().clone() for name, p in parameters.items()})
    findings.weights.update(widened(running_values(layers, running)))
    return findings
