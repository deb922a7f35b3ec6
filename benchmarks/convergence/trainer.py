"""Hugging Face's Trainer, with the arguments that its users give for these hyperparameters."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from plain import llama, validate
from task import Result, Task, Windows


class Ordered(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """Samples in their order, as the Trainer's dictionaries. Its models shift labels themselves."""

    def __init__(self, windows: Windows) -> None:
        self._windows = windows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for index in range(len(self._windows)):
            tokens, labels = self._windows[index]
            yield {"input_ids": torch.cat([tokens, labels[-1:]])}


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Return tokens and labels of a micro-batch. shift_labels: next tokens, as the model's loss takes them."""
    whole = torch.stack([sample["input_ids"] for sample in samples])
    tokens, labels = whole[:, :-1].contiguous(), whole[:, 1:].contiguous()
    return {"input_ids": tokens, "labels": tokens, "shift_labels": labels}


def train(task: Task, corpus: Path, seed: int) -> Result:
    """Train with ``transformers.Trainer``."""
    from transformers import Trainer, TrainingArguments

    model = llama(task, seed)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=task.steps,
            per_device_train_batch_size=task.micro_batch_size,
            gradient_accumulation_steps=task.chunks,
            learning_rate=task.learning_rate,
            lr_scheduler_type="cosine_with_min_lr",
            lr_scheduler_kwargs={"min_lr": task.min_learning_rate},
            warmup_steps=task.warmup_steps,
            weight_decay=task.weight_decay,
            adam_beta1=task.betas[0],
            adam_beta2=task.betas[1],
            adam_epsilon=task.eps,
            max_grad_norm=task.clip_norm,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=seed,
            remove_unused_columns=False,
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=Ordered(Windows(corpus, "train", task, seed)),
            data_collator=collate,
        )
        trainer.train()
    records = [record for record in trainer.state.log_history if "loss" in record]
    losses = [float(record["loss"]) for record in records]
    rates = [float(record["learning_rate"]) for record in records]
    model.eval()
    return Result(
        losses, rates, validate(task, corpus, lambda tokens: model(input_ids=tokens).logits)
    )
