"""Detection of the framework that a YAML, JSON or TOML document belongs to, and errors for those without an import."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.errors import ConfigError

Document = Mapping[str, Any]


class Foreign(NamedTuple):
    """A kind of file that is detected and refused."""

    what: str
    way: str
    """Next move for the user."""
    matches: Callable[[Document], bool]


OF_TORCHTITAN = {"job", "training", "parallelism", "experimental", "lr_scheduler", "activation_checkpoint", "profiling"}
"""Sections that torchtitan's TOML files and JSON dumps have and meshwright's files have not."""

HF_DIR = (
    'set model.builder = "hf:DIR" with the directory of the Hugging Face model (docs/huggingface-models.md), and '
    "prepare its text with `meshwright data prepare`"
)


def _has(*names: str) -> Callable[[Document], bool]:
    return lambda document: all(name in document for name in names)


def _table(document: Document, name: str) -> Document:
    inner = document.get(name)
    return inner if isinstance(inner, Mapping) else {}


def _is_accelerate(document: Document) -> bool:
    marks = (
        "compute_environment",
        "distributed_type",
        "num_machines",
        "machine_rank",
        "mixed_precision",
        "fsdp_config",
    )
    return "compute_environment" in document or sum(mark in document for mark in marks) >= 2


def _is_litgpt(document: Document) -> bool:
    marks = (
        "save_interval",
        "log_interval",
        "max_tokens",
        "max_seq_length",
        "lr_warmup_steps",
        "epochs",
        "tie_embeddings",
    )
    is_model = bool({"model_name", "model_config", "checkpoint_dir", "initial_checkpoint_dir"} & document.keys())
    return is_model and any(mark in _table(document, "train") for mark in marks)


def _is_neox(document: Document) -> bool:
    names = {name.replace("-", "_") for name in document if isinstance(name, str)}
    return "pipe_parallel_size" in names or {"model_parallel_size", "num_layers"} <= names


def _is_nemo(document: Document) -> bool:
    trainer = _table(document, "trainer")
    return "exp_manager" in document or bool({"num_nodes", "devices", "accelerator"} & trainer.keys())


def _is_torchtune(document: Document) -> bool:
    return "_component_" in _table(document, "model") or "_component_" in _table(document, "tokenizer")


FOREIGN = (
    Foreign(
        "an accelerate configuration: it describes processes and has no model",
        f"write a configuration of meshwright (configs/demo.toml) with its degrees in [parallel]; for a model {HF_DIR}",
        _is_accelerate,
    ),
    Foreign(
        "an axolotl configuration: it fine-tunes a Hugging Face model by name",
        HF_DIR,
        lambda document: (
            "base_model" in document and bool({"datasets", "micro_batch_size", "adapter"} & document.keys())
        ),
    ),
    Foreign(
        "a litgpt configuration: it names a model of litgpt, whose sizes are in its code",
        f"{HF_DIR}, or copy its [model.options] into a copy of configs/llama3-8b.toml",
        _is_litgpt,
    ),
    Foreign(
        "a GPT-NeoX configuration, which is not read",
        "write its model's values as Megatron-LM's flags in a text file, and import that",
        _is_neox,
    ),
    Foreign(
        "a NeMo configuration (Lightning trainer and exp_manager), which is not read",
        "import the run_config.yaml that Megatron-Bridge writes, or write its model's values as Megatron-LM's flags",
        _is_nemo,
    ),
    Foreign("a torchtune recipe: its model is a function of torchtune", HF_DIR, _is_torchtune),
    Foreign(
        "a DeepSpeed configuration: it describes batches and ZeRO, and has no model",
        "write a configuration of meshwright (configs/demo.toml), with its values in [batch], [parallel], [optimizer]",
        lambda document: bool(
            {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"} & document.keys()
        ),
    ),
    Foreign(
        "the config.json of a Hugging Face model, not of a training run",
        'set model.builder = "hf:DIR" with its directory (docs/huggingface-models.md), or convert it with '
        "`meshwright convert`",
        lambda document: "model_type" in document and bool({"architectures", "hidden_size"} & document.keys()),
    ),
    Foreign(
        "arguments of a Hugging Face trainer: they train a model by name",
        HF_DIR,
        lambda document: "model_name_or_path" in document,
    ),
)
"""Files of programs without an import, detected so that the error can name the next move; the first match applies."""


def recognise(path: Path, document: Document) -> str | None:
    """Return the framework of a document by its top-level keys: a key of ``convert.TRANSLATE``; None: not known.

    Raises:
        ConfigError: a file of another program, which is not imported.
    """
    if "MODEL_ARGS" in document:
        return "megatron"
    sections = set(document)
    if "model_spec" in document or len(sections & OF_TORCHTITAN) >= 2:
        return "torchtitan"
    if {"model", "train", "optimizer", "scheduler"} <= sections or "_target_" in _table(document, "model"):
        return "bridge"
    if "model_config" in _table(document, "model") or {"tokens", "parallelism"} <= sections:
        return "nanotron"
    foreign = next((foreign for foreign in FOREIGN if foreign.matches(document)), None)
    if foreign is not None:
        raise ConfigError("MW-INTEROP-090", f"{path}: {foreign.what}: {foreign.way}")
    return None
