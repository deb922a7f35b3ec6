"""The task of every contender: one model, one corpus, one order of samples, one set of first weights and
hyperparameters.

A Llama of 5.0 million parameters on Python source text. All sizes are those of ``TASK``; ``--steps``
and ``--tiny`` of ``run.py`` change them for a rehearsal.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

Sample = tuple[Tensor, Tensor]
"""Tokens and next tokens, both (S,)."""


NORMS = ("input_layernorm", "post_attention_layernorm")
"""Norms of a layer of Hugging Face's Llama."""


class Task(NamedTuple):
    """Sizes and hyperparameters."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 4
    ffn_size: int = 688
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    sequence_length: int = 256
    micro_batch_size: int = 4
    global_batch: int = 16
    steps: int = 600
    warmup_steps: int = 50
    learning_rate: float = 1e-3
    min_learning_rate: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    num_validation: int = 256
    """Samples of the validation loss."""

    @property
    def chunks(self) -> int:
        """Micro-batches of a step in one process."""
        return self.global_batch // self.micro_batch_size


TASK = Task()
TINY = TASK._replace(
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=96,
    sequence_length=32,
    steps=8,
)._replace(warmup_steps=2, num_validation=16)


class Result(NamedTuple):
    """What a contender reports."""

    losses: list[float]
    """Mean loss of each step, in nats per token."""
    rates: list[float]
    """Learning rate of each step; empty: the contender does not report it."""
    validation: float
    """Mean loss of the validation samples after the last step."""


class Windows:
    """Samples of one split: windows of the corpus that do not overlap.

    The order of training is a permutation by seed; validation takes windows at equal distances.
    """

    def __init__(self, corpus: Path, split: str, task: Task, seed: int) -> None:
        """Open ``corpus``/``split``.bin, an array of 16-bit tokens."""
        self._tokens = np.memmap(corpus / f"{split}.bin", dtype=np.uint16, mode="r")
        self._length = task.sequence_length
        num_windows = (len(self._tokens) - 1) // self._length
        if split == "train":
            wanted = task.steps * task.global_batch
            order = np.random.default_rng(seed).permutation(num_windows)[:wanted]
        else:
            wanted = task.num_validation
            order = np.linspace(0, num_windows - 1, wanted).astype(np.int64)
        if len(order) < wanted:
            raise SystemExit(f"{corpus}/{split}.bin has {len(order):,} windows of {wanted:,}")
        self._order = order

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Sample:
        start = int(self._order[index]) * self._length
        window = torch.from_numpy(self._tokens[start : start + self._length + 1].astype(np.int64))
        return window[:-1], window[1:]

    def batch(self, start: int, size: int) -> Sample:
        """Return samples [start, start + size): tokens and next tokens, both (B, S)."""
        tokens, labels = zip(*(self[index] for index in range(start, start + size)), strict=True)
        return torch.stack(tokens), torch.stack(labels)


class Stream:
    """Samples in their order, as this framework reads a dataset that has an order of its own."""

    def __init__(self, windows: Windows) -> None:
        self._windows = windows

    def __iter__(self) -> Iterator[Sample]:
        return self.iterate(0)

    def iterate(self, start: int) -> Iterator[Sample]:
        """Yield the samples from position ``start`` on."""
        for index in range(start, len(self._windows)):
            yield self._windows[index]


def build(split: str, corpus: str, task: dict[str, Any], seed: int) -> Stream:
    """Return a split for ``data.builder``."""
    return Stream(Windows(Path(corpus), split, as_task(task), seed))


def as_task(values: dict[str, Any]) -> Task:
    """Return the task of a table."""
    return Task(**{**values, "betas": tuple(values["betas"])})


def first_weights(task: Task, seed: int) -> dict[str, Tensor]:
    """Draw the first weights, float32, under the names of Hugging Face's Llama.

    Normal with standard deviation 0.02, and 0.02 / sqrt(2 layers) where a branch ends; norms are one.
    """
    generator = torch.Generator().manual_seed(seed)
    head = task.hidden_size // task.num_heads
    shapes = {
        "self_attn.q_proj": (task.num_heads * head, task.hidden_size),
        "self_attn.k_proj": (task.num_kv_heads * head, task.hidden_size),
        "self_attn.v_proj": (task.num_kv_heads * head, task.hidden_size),
        "self_attn.o_proj": (task.hidden_size, task.num_heads * head),
        "mlp.gate_proj": (task.ffn_size, task.hidden_size),
        "mlp.up_proj": (task.ffn_size, task.hidden_size),
        "mlp.down_proj": (task.hidden_size, task.ffn_size),
    }
    ends = ("self_attn.o_proj", "mlp.down_proj")
    found = {"model.embed_tokens.weight": (task.vocab_size, task.hidden_size)}
    for layer in range(task.num_layers):
        found |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in shapes.items()}
    found["lm_head.weight"] = (task.vocab_size, task.hidden_size)
    weights = {}
    for name, shape in found.items():
        is_end = name.removesuffix(".weight").endswith(ends)
        std = 0.02 / (2 * task.num_layers) ** 0.5 if is_end else 0.02
        weights[name] = torch.empty(shape).normal_(0.0, std, generator=generator)
    norms = [
        f"model.layers.{layer}.{name}.weight" for layer in range(task.num_layers) for name in NORMS
    ]
    for name in [*norms, "model.norm.weight"]:
        weights[name] = torch.ones(task.hidden_size)
    return weights


def hugging_face_config(task: Task) -> dict[str, Any]:
    """Return the fields of Hugging Face's ``LlamaConfig``."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": task.vocab_size,
        "hidden_size": task.hidden_size,
        "intermediate_size": task.ffn_size,
        "num_hidden_layers": task.num_layers,
        "num_attention_heads": task.num_heads,
        "num_key_value_heads": task.num_kv_heads,
        "max_position_embeddings": task.sequence_length,
        "rms_norm_eps": task.norm_eps,
        "rope_theta": task.rope_theta,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
