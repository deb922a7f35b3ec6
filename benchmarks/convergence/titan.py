"""torchtitan 0.2.2's Llama, loss, optimizer and learning rate, in the order of its trainer's step.

Its command refuses to run without a GPU, so the loop over micro-batches is written here.
"""

from __future__ import annotations

from pathlib import Path

import torch
from plain import validate
from task import Result, Task, Windows, first_weights


def train(task: Task, corpus: Path, seed: int) -> Result:
    """Train with torchtitan's parts."""
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.components.lr_scheduler import build_lr_schedulers
    from torchtitan.components.optimizer import OptimizersContainer
    from torchtitan.config.job_config import LRScheduler

    model = build(task, seed)
    settings = {
        "lr": task.learning_rate,
        "betas": task.betas,
        "eps": task.eps,
        "weight_decay": task.weight_decay,
    }
    optimizers = OptimizersContainer([model], torch.optim.AdamW, settings)
    factor = task.min_learning_rate / task.learning_rate
    schedule = LRScheduler(
        warmup_steps=task.warmup_steps, decay_type="cosine", min_lr_factor=factor
    )
    schedulers = build_lr_schedulers(optimizers, schedule, task.steps)
    windows = Windows(corpus, "train", task, seed)
    num_tokens = task.global_batch * task.sequence_length
    losses, rates = [], []
    for step in range(task.steps):
        optimizers.zero_grad()
        total = 0.0
        for chunk in range(task.chunks):
            start = step * task.global_batch + chunk * task.micro_batch_size
            tokens, labels = windows.batch(start, task.micro_batch_size)
            loss = cross_entropy_loss(model(tokens), labels) / num_tokens
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), task.clip_norm)
        rates.append(schedulers.schedulers[0].get_last_lr()[0])
        optimizers.step()
        schedulers.step()
        losses.append(total)
    return Result(losses, rates, validate(task, corpus, model))


def build(task: Task, seed: int) -> torch.nn.Module:
    """Return its Llama with the first weights, through its own adapter of Hugging Face's names."""
    from torchtitan.models.llama3 import Llama3StateDictAdapter, Transformer, TransformerModelArgs

    # it rounds 2/3 of 4 x dim up to a multiple
    assert task.ffn_size >= 8 * task.hidden_size // 3
    arguments = TransformerModelArgs(
        dim=task.hidden_size,
        n_layers=task.num_layers,
        n_heads=task.num_heads,
        n_kv_heads=task.num_kv_heads,
        vocab_size=task.vocab_size,
        multiple_of=task.ffn_size,
        norm_eps=task.norm_eps,
        rope_theta=task.rope_theta,
        max_seq_len=task.sequence_length,
    )
    arguments.rope_scaling_args.scaling_factor = 1.0
    model = Transformer(arguments)
    with torch.no_grad():
        model.init_weights(torch.device("cpu"))
    adapter = Llama3StateDictAdapter(arguments, None)
    missing = model.load_state_dict(adapter.from_hf(first_weights(task, seed)), strict=False)
    assert set(missing.missing_keys) <= {"freqs_cis"} and not missing.unexpected_keys, missing
    return model
