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
    has_megatron_flags,
    is_bridge,
    is_megatron,
    targets,
)
from meshwright_interop.configs.source_keys import SourceKey


class Foreign(NamedTuple):
    """A kind of file that is detected and refused."""

    what: str
    way: str
    """Next move for the user."""
    matches: Callable[[Document], bool]


SUPPORTED = (
    "torchtitan's TOML and JSON, nanotron's YAML, Megatron-Bridge's run_config.yaml, and Megatron-LM's flags in a "
    "model_config.yaml or a text file are read"
)
OWN = "write a configuration of meshwright (`meshwright init`, or a copy of configs/demo.toml)"
JOB_CONFIG = "write its values in the keys of torchtitan's TOML, with model.name and model.flavor, and import that"
HF_DIR = (
    'set model.builder = "hf:DIR" with the directory of the Hugging Face model (docs/huggingface-models.md), and '
    "prepare its text with `meshwright data prepare`"
)


def _has(*names: str) -> Callable[[Document], bool]:
    return lambda document: all(name in document for name in names)


def _count(document: Document, names: str) -> int:
    """Return how many of the keys, separated by blanks, the document has."""
    return sum(name in document for name in names.split())


def _table(document: Document, name: str) -> Document:
    inner = document.get(name)
    return inner if isinstance(inner, Mapping) else {}


def _is_accelerate(document: Document) -> bool:
    others = "distributed_type num_machines machine_rank main_process_ip num_processes fsdp_config"
    return "compute_environment" in document or _count(document, others) >= 2


def _is_litgpt(document: Document) -> bool:
    train = "save_interval log_interval max_tokens max_seq_length lr_warmup_steps epochs tie_embeddings max_norm"
    has_model = _count(document, "model_name model_config checkpoint_dir initial_checkpoint_dir") > 0
    return has_model and _count(_table(document, "train"), train) >= 2


def _is_llm_foundry(document: Document) -> bool:
    name = str(_table(document, "model").get("name"))
    if {"integrations", "parameters"} <= document.keys():  # a run of its cluster tool
        return True
    trainer = "device_train_microbatch_size device_eval_batch_size train_loader eval_loader load_path"
    size = _count(document, "global_train_batch_size device_train_batch_size") > 0
    return (
        name.endswith("_causal_lm") or (size and "name" in _table(document, "model")) or _count(document, trainer) >= 2
    )


def _is_olmo(document: Document) -> bool:
    model = _table(document, "model")
    run = _count(document, "run_name max_duration save_folder global_train_batch_size speed_monitor")
    sizes = _count(model, "d_model n_heads n_layers mlp_ratio flash_attention weight_tying")
    return "name" not in model and sizes >= 2 and run >= 1  # llm-foundry has the same keys, and a name


def _is_olmo_core(document: Document) -> bool:
    return any("_CLASS_" in _table(document, name) for name in document)


def _is_llama_factory(document: Document) -> bool:
    return "finetuning_type" in document or _count(document, "stage template cutoff_len dataset_dir do_train") >= 2


def _is_deepspeed(document: Document) -> bool:
    own = "zero_optimization train_micro_batch_size_per_gpu zero_allow_untested_optimizer wall_clock_breakdown"
    others = "train_batch_size fp16 bf16 gradient_clipping gradient_accumulation_steps steps_per_print scheduler"
    return _count(document, own) > 0 or ("train_batch_size" in document and _count(document, others) >= 3)


def _is_compose(document: Document) -> bool:
    services = _table(document, "services").values()
    return any(isinstance(each, Mapping) and ({"image", "build"} & each.keys()) for each in services)


def _is_lightning(document: Document) -> bool:
    trainer = "num_nodes devices accelerator max_epochs strategy precision"
    return "class_path" in _table(document, "model") or _count(_table(document, "trainer"), trainer) >= 1


def _is_picotron(document: Document) -> bool:
    return _count(_table(document, "distributed"), "tp_size pp_size cp_size dp_size pp_engine") >= 2


def _is_maxtext(document: Document) -> bool:
    return (
        _count(document, "base_emb_dim base_num_decoder_layers base_mlp_dim per_device_batch_size ici_fsdp_parallelism")
        >= 2
    )


def _is_fairseq(document: Document) -> bool:
    return {"task", "optimization"} <= document.keys() and _count(document, "distributed_training dataset common") >= 1


def _is_neox(document: Document) -> bool:
    names = {name.replace("-", "_") for name in document if isinstance(name, str)}
    return "pipe_parallel_size" in names or {"model_parallel_size", "num_layers"} <= names


def _is_nemo(document: Document) -> bool:
    return "exp_manager" in document or any(target.startswith("nemo.") for target in targets(document))


def _is_torchtune(document: Document) -> bool:
    return any("_component_" in _table(document, name) for name in document)


FOREIGN = (
    Foreign(
        "the JSON that torchtitan writes of a configuration in Python: its model is a tree of modules",
        f"{JOB_CONFIG}; or {OWN}",
        _has("model_spec"),
    ),
    Foreign(
        "a Kubernetes manifest: it describes pods and trains nothing",
        f"{OWN}; `meshwright kubernetes` writes the manifest of a run",
        _has("apiVersion", "kind"),
    ),
    Foreign("a compose file of containers: it trains nothing", OWN, _is_compose),
    Foreign(
        "an OLMo configuration, which is not read",
        f"{OWN}, with its sizes in [model.options]; for a released model {HF_DIR}",
        lambda document: _is_olmo(document) or _is_olmo_core(document),
    ),
    Foreign(
        "a llm-foundry configuration: its model is a class of llm-foundry",
        f"{OWN}, with its sizes in [model.options]; for a model of Hugging Face {HF_DIR}",
        _is_llm_foundry,
    ),
    Foreign(
        "an accelerate configuration: it describes processes and has no model",
        f"{OWN}, with its degrees in [parallel]; for a model {HF_DIR}",
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
        "a NeMo configuration, which is not read",
        "import the run_config.yaml that Megatron-Bridge writes, or write its model's values as Megatron-LM's flags",
        _is_nemo,
    ),
    Foreign(
        "a configuration of a PyTorch Lightning trainer: its model is a class of its own program",
        f"{OWN}, and name a function that builds the model in model.builder (docs/models.md)",
        _is_lightning,
    ),
    Foreign("a torchtune recipe: its model is a function of torchtune", HF_DIR, _is_torchtune),
    Foreign("a LLaMA-Factory configuration: it fine-tunes a Hugging Face model by name", HF_DIR, _is_llama_factory),
    Foreign(
        "a DeepSpeed configuration: it describes batches and ZeRO, and has no model",
        f"{OWN}, with its values in [batch], [parallel], [optimizer]",
        _is_deepspeed,
    ),
    Foreign("a picotron configuration, which is not read", f"{OWN}; for its model {HF_DIR}", _is_picotron),
    Foreign("a MaxText configuration, which is not read", f"{OWN}, with its sizes in [model.options]", _is_maxtext),
    Foreign("a fairseq configuration, which is not read", f"{OWN}, with its sizes in [model.options]", _is_fairseq),
    Foreign(
        "the settings of a run that wandb has recorded",
        "import the file that the run was started with",
        lambda document: "wandb_version" in document or "_wandb" in document,
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
        lambda document: (
            "model_name_or_path" in document
            or _count(document, "per_device_train_batch_size num_train_epochs gradient_accumulation_steps") >= 2
        ),
    ),
    Foreign(
        "a Hydra configuration: its sections name classes of its own program",
        f"{OWN}, and name a function that builds the model in model.builder (docs/models.md)",
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
