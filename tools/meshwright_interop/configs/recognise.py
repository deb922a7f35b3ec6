"""Detection of the framework that wrote a document or a list of flags, by keys that other programs
rarely have. No suffix is taken for a format: most programs have YAML.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.errors import ConfigError
from meshwright.terminal.output import abridge
from meshwright_interop.configs.flags import LAUNCHER, PROGRAM
from meshwright_interop.configs.source_keys import SourceKey

Document = Mapping[str, Any]


class Signature(NamedTuple):
    """Distinctive keys of a format: dotted patterns, separated by blanks."""

    alone: str
    """Patterns of which one is enough."""
    several: str = ""
    """Patterns of which a document needs ``least``."""
    least: int = 3

    def matches(self, document: Document) -> bool:
        """Return True if the document is of this format."""
        if any(has_key(document, pattern) for pattern in self.alone.split()):
            return True
        matched = [pattern for pattern in self.several.split() if has_key(document, pattern)]
        return len(matched) >= self.least


SIGNATURES = {
    "megatron": Signature("MODEL_ARGS.--*"),
    "bridge": Signature(
        "",
        """
        train.train_iters train.rampup_batch_size model.*_model_parallel_size model.num_query_groups
        model.layernorm_epsilon optimizer.adam_beta1 optimizer.use_distributed_optimizer
        scheduler.lr_decay_style scheduler.lr_warmup_iters ddp.overlap_grad_reduce
        ddp.use_distributed_optimizer dist.use_megatron_fsdp checkpoint.fully_parallel_save
        """,
    ),
    "nanotron": Signature(
        "model.model_config.is_*_config",
        """
        general.run parallelism.dp parallelism.pp_engine parallelism.tp_mode tokens.train_steps
        tokens.batch_accumulation_per_replica optimizer.optimizer_factory
        optimizer.learning_rate_scheduler optimizer.zero_stage checkpoints.checkpoint_interval
        data_stages.start_training_step tokenizer.tokenizer_name_or_path
        logging.iteration_step_info_interval
        """,
    ),
    "torchtitan": Signature(
        "model.flavor training.local_batch_size parallelism.*_parallel_degree",
        """
        job.dump_folder model.hf_assets_path model.converters training.seq_len training.max_norm
        training.batch_size training.*_parallel_degree experimental.*_parallel_degree
        lr_scheduler.decay_ratio lr_scheduler.min_lr_factor activation_checkpoint.mode
        metrics.log_freq metrics.enable_tensorboard profiling.enable_profiling checkpoint.async_mode
        """,
        2,
    ),
}
"""Format -> its signature; the first that matches applies."""
MEGATRON_FLAGS = """
    max-position-embeddings train-iters train-samples tensor-model-parallel-size sequence-parallel
    pipeline-model-parallel-size context-parallel-size ffn-hidden-size kv-channels num-query-groups
    group-query-attention lr-decay-style lr-decay-iters lr-warmup-iters lr-warmup-fraction
    eval-iters tokenizer-type vocab-file merge-file hidden-dropout attention-dropout init-method-std
    clip-grad adam-beta1 adam-beta2 use-distributed-optimizer overlap-grad-reduce normalization
    position-embedding-type untie-embeddings-and-output-weights use-mcore-models transformer-impl
    use-flash-attn recompute-granularity recompute-activations distributed-backend rotary-base
"""
"""Flags of Megatron-LM that other training scripts rarely have; two are enough."""
REQUIRED_FLAGS = {"num-layers", "hidden-size", "num-attention-heads"}
"""Flags without which Megatron-LM does not start; all of them are enough."""
SUPPORTED = (
    "torchtitan's TOML, nanotron's YAML, Megatron-Bridge's run_config.yaml, and Megatron-LM's flags"
    " in a model_config.yaml or a text file are read"
)
OWN = (
    "write a configuration of meshwright (`meshwright init`, or a copy of configs/demo.toml); for a"
    ' model of Hugging Face with model.builder = "hf:DIR" (docs/huggingface-models.md)'
)
MAX_KEY = 40
"""Upper limit of the characters of one key in a message."""


def has_key(document: Document, dotted: str) -> bool:
    """Return True if the document has a key of this dotted pattern;
    a list counts as each of its tables.
    """
    name, _, below = dotted.partition(".")
    for key, value in document.items():
        if not fnmatchcase(str(key), name):
            continue
        tables = value if isinstance(value, list) else [value]
        tables = [table for table in tables if isinstance(table, Mapping)]
        if not below or any(has_key(table, below) for table in tables):
            return True
    return False


def recognise(document: Document) -> str | None:
    """Return the framework of a document by its keys: a key of ``convert.TRANSLATE``; None:
    unknown.
    """
    for section in document.values():
        target = section.get("_target_") if isinstance(section, Mapping) else None
        if isinstance(target, str) and target.startswith("megatron."):
            return "bridge"
    formats = (name for name, signature in SIGNATURES.items() if signature.matches(document))
    return next(formats, None)


def unknown_format(path: Path, document: Document) -> ConfigError:
    """Return the error for a document of no supported program, with its keys."""
    keys = abridge([str(key)[:MAX_KEY] for key in document])
    return ConfigError(
        "MW-INTEROP-142",
        f"{path}: an unknown format, with the keys {keys}: {SUPPORTED}. If it is one of these, name"
        f" it with --from; else {OWN}",
    )


def check_flags(path: Path, items: Mapping[str, SourceKey]) -> None:
    """Check that the flags of a text file (:func:`flags.read_flags`) are Megatron-LM's.

    Raises:
        ConfigError: flags of another program.
    """
    flags = {name for name in items if not name.startswith(LAUNCHER)}
    program = items[PROGRAM].key.rpartition("/")[2][:MAX_KEY] if PROGRAM in items else ""
    are_megatrons = flags >= REQUIRED_FLAGS or len(flags & set(MEGATRON_FLAGS.split())) >= 2
    if not flags or are_megatrons or program.startswith("pretrain_"):
        return
    of_program = f" of {program}" if program else ""
    written = abridge([item.key[:MAX_KEY] for name, item in items.items() if name in flags])
    raise ConfigError(
        "MW-INTEROP-143",
        f"{path}: the flags{of_program} are not Megatron-LM's ({written}): {SUPPORTED}. If they are"
        f" Megatron-LM's, add --from megatron; else {OWN}",
    )
