"""The shapes of a micro-batch, known from the configuration before anything is read: on meta."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from meshwright.config import RunConfig
from meshwright.data.dataset import open_dataset
from meshwright.data.span_corruption import lengths


def example(config: RunConfig, micro_batch_size: int) -> tuple[Any, Tensor]:
    """Return (inputs, labels) of one micro-batch on meta. Of a user's own dataset the first sample is read.

    Raises:
        DataError: that dataset cannot be opened, or is not of pairs of tensors.
    """
    if config.data.builder is not None:
        dataset = open_dataset(config, "train")
        assert dataset is not None
        inputs, labels = dataset.sample(0)
        return tree_map(lambda leaf: _batched(leaf, micro_batch_size), inputs), _batched(labels, micro_batch_size)
    if config.data.task == "span_corruption":
        shape = lengths(config.data.sequence_length)
        ids = {
            "encoder_ids": _ids(micro_batch_size, shape.encoder),
            "decoder_ids": _ids(micro_batch_size, shape.decoder),
        }
        return ids, _ids(micro_batch_size, shape.decoder)
    tokens, labels = (_ids(micro_batch_size, config.data.sequence_length) for _ in range(2))
    if config.data.document_boundaries:
        return {"tokens": tokens, "starts": torch.zeros_like(tokens, dtype=torch.bool)}, labels
    return tokens, labels


def _ids(samples: int, length: int) -> Tensor:
    return torch.zeros((samples, length), dtype=torch.int64, device="meta")


def _batched(leaf: Tensor, micro_batch_size: int) -> Tensor:
    return torch.empty((micro_batch_size, *leaf.shape), dtype=leaf.dtype, device="meta")
