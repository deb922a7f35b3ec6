"""Detection of the framework that a YAML, JSON or TOML document or a list of flags belongs to.

A document is one of the supported formats by its signature (signatures.py), one of ``FOREIGN`` by the keys listed here,
or unknown: an error in both of the latter cases, with the next move. No suffix is taken for a format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from meshwright.errors import ConfigError
from meshwright.terminal.output import abridge
from meshwright_interop.configs.flags import LAUNCHER, PROGRAM
from meshwright_interop.configs.signatures import (
    NANOTRON,
    TORCHTITAN,
    Document,
    has_key,
    has_megatron_flags,
    is_bridge,
    is_megatron,
    targets,
)
from meshwright_interop.configs.source_keys import SourceKey

Test = Callable[[Document], bool]


class Foreign(NamedTuple):
    """A kind of file that is detected and refused."""

    what: str
    way: str
    """Next move for the user."""
    matches: Test


SUPPORTED = (
    "torchtitan's TOML and JSON, nanotron's YAML, Megatron-Bridge's run_config.yaml, and Megatron-LM's flags in a "
    "model_config.yaml or a text file are read"
)
OWN = "write a configuration of meshwright (`meshwright init`, or a copy of configs/demo.toml)"
JOB_CONFIG = "write its values in the keys of torchtitan's TOML, with model.name and model.flavor, and import that"
WITH_SIZES = f"{OWN}, with its sizes in [model.options]"
WITH_BUILDER = f"{OWN}, and name a function that builds the model in model.builder (docs/models.md)"
HF_DIR = (
    'set model.builder = "hf:DIR" with the directory of the Hugging Face model (docs/huggingface-models.md), and '
    "prepare its text with `meshwright data prepare`"
)


def has(patterns: str, least: int = 1) -> Test:
    """Return a test for documents with keys of at least ``least`` of these dotted patterns, separated by blanks."""
    return lambda document: sum(has_key(document, pattern) for pattern in patterns.split()) >= least


def any_of(*tests: Test) -> Test:
    """Return a test that is met where one of the tests is."""
    return lambda document: any(test(document) for test in tests)


def all_of(*tests: Test) -> Test:
    """Return a test that is met where all of the tests are."""
    return lambda document: all(test(document) for test in tests)


def _text(document: Document, section: str, name: str) -> str:
    """Return a value of a section as text."""
    table = document.get(section)
    return str(table.get(name)) if isinstance(table, Mapping) else ""


def _is_olmo(document: Document) -> bool:
    """Return True for OLMo's keys. llm-foundry has the same, and a name of the model."""
    sizes = "model.d_model model.n_heads model.n_layers model.mlp_ratio model.flash_attention model.weight_tying"
    run = "run_name max_duration save_folder global_train_batch_size speed_monitor"
    return not has_key(document, "model.name") and has(sizes, 2)(document) and has(run)(document)


FOREIGN = (
    Foreign(
        "the JSON that torchtitan writes of a configuration in Python: its model is a tree of modules",
        f"{JOB_CONFIG}; or {OWN}",
        has("model_spec"),
    ),
    Foreign(
        "a Kubernetes manifest: it describes pods and trains nothing",
        f"{OWN}; `meshwright kubernetes` writes the manifest of a run",
        has("apiVersion kind", 2),
    ),
    Foreign("a compose file of containers: it trains nothing", OWN, has("services.*.image services.*.build")),
    Foreign(
        "an OLMo configuration, which is not read",
        f"{WITH_SIZES}; for a released model {HF_DIR}",
        lambda document: _is_olmo(document) or has("*._CLASS_")(document),
    ),
    Foreign(
        "a llm-foundry configuration: its model is a class of llm-foundry",
        f"{WITH_SIZES}; for a model of Hugging Face {HF_DIR}",
        any_of(
            has("integrations parameters", 2),  # a run of its cluster tool
            has("device_train_microbatch_size device_eval_batch_size train_loader eval_loader load_path", 2),
            all_of(has("model.name"), has("global_train_batch_size device_train_batch_size")),
            lambda document: _text(document, "model", "name").endswith("_causal_lm"),
        ),
    ),
    Foreign(
        "an accelerate configuration: it describes processes and has no model",
        f"{OWN}, with its degrees in [parallel]; for a model {HF_DIR}",
        any_of(
            has("compute_environment"),
            has("distributed_type num_machines machine_rank main_process_ip num_processes fsdp_config", 2),
        ),
    ),
    Foreign(
        "an axolotl configuration: it fine-tunes a Hugging Face model by name",
        HF_DIR,
        all_of(has("base_model"), has("datasets micro_batch_size adapter")),
    ),
    Foreign(
        "a litgpt configuration: it names a model of litgpt, whose sizes are in its code",
        f"{HF_DIR}, or copy its [model.options] into a copy of configs/llama3-8b.toml",
        all_of(
            has("model_name model_config checkpoint_dir initial_checkpoint_dir"),
            has(
                """train.save_interval train.log_interval train.max_tokens train.max_seq_length train.lr_warmup_steps
                train.epochs train.tie_embeddings train.max_norm""",
                2,
            ),
        ),
    ),
    Foreign(
        "a GPT-NeoX configuration, which is not read",
        "write its model's values as Megatron-LM's flags in a text file, and import that",
        any_of(has("pipe[-_]parallel[-_]size"), has("model[-_]parallel[-_]size num[-_]layers", 2)),
    ),
    Foreign(
        "a NeMo configuration, which is not read",
        "import the run_config.yaml that Megatron-Bridge writes, or write its model's values as Megatron-LM's flags",
        lambda document: "exp_manager" in document or any(name.startswith("nemo.") for name in targets(document)),
    ),
    Foreign(
        "a configuration of a PyTorch Lightning trainer: its model is a class of its own program",
        WITH_BUILDER,
        has(
            """model.class_path trainer.num_nodes trainer.devices trainer.accelerator trainer.max_epochs
            trainer.strategy trainer.precision"""
        ),
    ),
    Foreign("a torchtune recipe: its model is a function of torchtune", HF_DIR, has("*._component_")),
    Foreign(
        "a LLaMA-Factory configuration: it fine-tunes a Hugging Face model by name",
        HF_DIR,
        any_of(has("finetuning_type"), has("stage template cutoff_len dataset_dir do_train", 2)),
    ),
    Foreign(
        "a DeepSpeed configuration: it describes batches and ZeRO, and has no model",
        f"{OWN}, with its values in [batch], [parallel], [optimizer]",
        any_of(
            has("zero_optimization train_micro_batch_size_per_gpu zero_allow_untested_optimizer wall_clock_breakdown"),
            all_of(
                has("train_batch_size"),
                has("fp16 bf16 gradient_clipping gradient_accumulation_steps steps_per_print scheduler", 2),
            ),
        ),
    ),
    Foreign(
        "a picotron configuration, which is not read",
        f"{OWN}; for its model {HF_DIR}",
        has("distributed.tp_size distributed.pp_size distributed.cp_size distributed.dp_size distributed.pp_engine", 2),
    ),
    Foreign(
        "a MaxText configuration, which is not read",
        WITH_SIZES,
        has("base_emb_dim base_num_decoder_layers base_mlp_dim per_device_batch_size ici_fsdp_parallelism", 2),
    ),
    Foreign(
        "a fairseq configuration, which is not read",
        WITH_SIZES,
        all_of(has("task optimization", 2), has("distributed_training dataset common")),
    ),
    Foreign(
        "the settings of a run that wandb has recorded",
        "import the file that the run was started with",
        has("wandb_version _wandb"),
    ),
    Foreign(
        "the config.json of a Hugging Face model, not of a training run",
        'set model.builder = "hf:DIR" with its directory (docs/huggingface-models.md), or convert it with '
        "`meshwright convert`",
        all_of(has("model_type"), has("architectures hidden_size")),
    ),
    Foreign(
        "arguments of a Hugging Face trainer: they train a model by name",
        HF_DIR,
        any_of(
            has("model_name_or_path"),
            has("per_device_train_batch_size num_train_epochs gradient_accumulation_steps", 2),
        ),
    ),
    Foreign(
        "a Hydra configuration: its sections name classes of its own program",
        WITH_BUILDER,
        lambda document: any(targets(document)) or isinstance(document.get("defaults"), list),
    ),
)
"""Files of programs without an import, detected so that the error can name the next move; the first match applies."""


MAX_KEY = 40
"""Upper limit of the characters of one key in a message."""


def recognise(path: Path, document: Document) -> str | None:
    """Return the framework of a document by its keys: a key of ``convert.TRANSLATE``; None: unknown.

    Raises:
        ConfigError: a file of another program, which is not imported.
    """
    if is_megatron(document):
        return "megatron"
    if is_bridge(document):
        return "bridge"
    if NANOTRON.matches(document):
        return "nanotron"
    if TORCHTITAN.matches(document) and "model_spec" not in document:
        return "torchtitan"
    foreign = next((foreign for foreign in FOREIGN if foreign.matches(document)), None)
    if foreign is not None:
        raise ConfigError("MW-INTEROP-090", f"{path}: {foreign.what}: {foreign.way}")
    return None


def unknown_format(path: Path, document: Document) -> ConfigError:
    """Return the error for a document of no known program, with its keys and the formats that are read."""
    keys = abridge([str(key)[:MAX_KEY] for key in document])
    return ConfigError(
        "MW-INTEROP-142",
        f"{path}: an unknown format, with the keys {keys}: {SUPPORTED}. If it is one of these, name it with --from; "
        f"else {OWN}",
    )


def check_flags(path: Path, items: Mapping[str, SourceKey]) -> None:
    """Check that the flags of a text file (:func:`flags.read_flags`) are Megatron-LM's.

    Raises:
        ConfigError: flags of another program.
    """
    flags = [name for name in items if not name.startswith(LAUNCHER)]
    name = items[PROGRAM].key.rpartition("/")[2][:MAX_KEY] if PROGRAM in items else ""
    if not flags or name.startswith("pretrain_") or has_megatron_flags(flags):
        return
    of_program = f" of {name}" if name else ""
    raise ConfigError(
        "MW-INTEROP-143",
        f"{path}: the flags{of_program} are not Megatron-LM's "
        f"({abridge([items[flag].key[:MAX_KEY] for flag in flags])}): {SUPPORTED}. If they are Megatron-LM's, add "
        f"--from megatron; else {OWN}",
    )
