"""Translation of the JSON that torchtitan writes of its Python configurations (``--debug.save_config_file``).

Source: ``Trainer.Config.to_dict`` in ``torchtitan/trainer.py`` and the nested ``Config`` classes, August 2026. The dump
has the whole model as nested modules, and optimizers as groups of parameters. Other keys become those of the last TOML
files, or stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.errors import ConfigError
from meshwright_interop.configs.source_keys import DEPTH_INIT, TOKENIZER, DropReason, SourceKey
from meshwright_interop.configs.translation import Translation

SPEC = "model_spec"
NAME = "model_spec.name"
MODEL = "model_spec.model."
GROUP = "optimizer.param_groups"
LOADER = "dataloader."
RENAMED = {
    "dump_folder": "job.dump_folder",
    "hf_assets_path": "model.hf_assets_path",
    "training.max_context_length": "training.seq_len",
    "parallelism.num_pp_microbatches": "parallelism.pipeline_parallel_microbatches",
    "compile.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
    **{f"validator.{name}": f"validation.{name}" for name in ("enable", "freq", "steps")},
    **{
        f"profiler.{name}": f"profiling.{name}"
        for name in ("enable_profiling", "profile_freq", "save_traces_folder", "enable_memory_snapshot")
    },
}
"""Key of the dump -> key of the last TOML files."""


def as_job_config(document: Mapping[str, Any], items: Mapping[str, SourceKey]) -> dict[str, SourceKey]:
    """Return the items of a dump with the names of the last TOML files; the layers of the model as one list."""
    renamed = {RENAMED.get(key, key): item for key, item in items.items()}
    tokens = _integer(items.get("training.num_tokens_per_microbatch_per_dp_rank"))
    total = _integer(items.get("training.num_tokens_per_train_step"))
    length = _integer(items.get("training.max_context_length"))
    if tokens and length:
        item = items["training.num_tokens_per_microbatch_per_dp_rank"]
        stages = _integer(items.get("parallelism.pipeline_parallel_degree")) or 1
        chunks = _integer(items.get("parallelism.num_pp_microbatches")) or 1
        samples = tokens // length * (chunks if stages > 1 else 1)
        renamed["training.local_batch_size"] = SourceKey(item.key, samples, item.place)
        del renamed[item.key]
    if total is not None and length:
        item = items["training.num_tokens_per_train_step"]
        renamed["training.global_batch_size"] = SourceKey(item.key, total // length if total > 0 else -1, item.place)
        del renamed[item.key]
    recompute = document.get("activation_checkpoint")
    if isinstance(recompute, Mapping) and "mode" not in recompute:
        place = items[next(key for key in items if key.startswith("activation_checkpoint"))].place
        is_selective = "force_recompute_mm_shapes_by_fqns" in recompute
        mode = "selective" if is_selective else "memory_budget" if "memory_budget" in recompute else "full"
        renamed["activation_checkpoint.mode"] = SourceKey("activation_checkpoint", mode, place)
        if is_selective:
            renamed["activation_checkpoint.selective_ac_option"] = SourceKey("activation_checkpoint", "op", place)
    elif "activation_checkpoint" in document and recompute is None:
        place = items["activation_checkpoint"].place
        renamed["activation_checkpoint.mode"] = SourceKey("activation_checkpoint", "none", place)
        renamed.pop("activation_checkpoint", None)
    return renamed | _optimizer(items)


def _integer(item: SourceKey | None) -> int | None:
    return item.value if item is not None and type(item.value) is int else None


def _optimizer(items: Mapping[str, SourceKey]) -> dict[str, SourceKey]:
    """Return the keys of the only group of parameters, with the names of the TOML files."""
    item = items.get(GROUP)
    groups = item.value if item is not None and isinstance(item.value, list) else []
    if item is None or len(groups) != 1 or not isinstance(groups[0], dict):
        return {}
    options = groups[0].get("optimizer_kwargs")
    found = {"name": groups[0].get("optimizer_name"), **(options if isinstance(options, dict) else {})}
    betas = found.pop("betas", None)
    if isinstance(betas, list) and len(betas) == 2:
        found |= {"beta1": betas[0], "beta2": betas[1]}
    return {f"optimizer.{name}": SourceKey(f"{GROUP}.{name}", value, item.place) for name, value in found.items()}


def is_dump(translation: Translation) -> bool:
    """Return True if the file is a dump: it has the whole model."""
    return NAME in translation.items


def dumped_dataset(translation: Translation) -> str:
    """Return the name of the dataset, and refuse one of conversations, whose labels are masked there."""
    conversations = next(
        (key for key in translation.items if key.startswith(LOADER) and key.endswith("messages_fn")), None
    )
    if conversations is not None:
        translation.refuse(conversations, "the labels of a conversation are not masked here")
    path = next((key for key in translation.items if key.startswith(LOADER) and key.endswith(".path")), None)
    return "its own dataset" if path is None else str(translation.items[path].value)


def dumped_model(translation: Translation) -> int:
    """Translate the modules of the model to options of Llama, and return the number of layers.

    Raises:
        ConfigError: the model is none that Llama's options describe, or the optimizer has several groups.
    """
    name = translation.text(NAME)
    translation.text("model_spec.flavor")
    layers = translation.value(f"{MODEL}layers")
    if not isinstance(layers, list) or not layers or not all(isinstance(layer, dict) for layer in layers):
        raise translation.unsupported_model(NAME, f"the modules of {name}, only those of llama3 and qwen3")
    first = layers[0]
    if any(_sizes(layer) != _sizes(first) for layer in layers):
        raise translation.unsupported_model(NAME, "layers of several kinds")
    attention, mlp = _table(first, "attention"), _table(first, "feed_forward")
    _refuse_others(translation, first, attention, mlp)
    rope, norm = _table(attention, "rope"), _table(first, "attention_norm")
    heads, width = attention.get("n_heads"), translation.value(f"{MODEL}dim")
    kv_heads, size = attention.get("n_kv_heads"), attention.get("head_dim")
    translation.put("model.builder", "meshwright_models.llama:build", f"the modules of {name}")
    translation.put("model.options.vocab_size", translation.count(f"{MODEL}vocab_size", 1))
    translation.put("model.options.hidden_size", translation.count(f"{MODEL}dim", 1))
    translation.put("model.options.num_layers", len(layers))
    translation.put("model.options.num_heads", heads)
    translation.put("model.options.num_kv_heads", kv_heads or heads)
    if type(size) is int and type(heads) is int and size * heads != width:
        translation.put("model.options.head_dim", size)
    translation.put("model.options.ffn_size", _table(mlp, "w1").get("out_features"))
    translation.put("model.options.norm_eps", norm.get("eps", 1e-5))
    translation.put("model.options.residual_init", "layer_index", DEPTH_INIT)
    translation.put("model.options.rope_theta", rope.get("theta"))
    if rope.get("scaling") == "llama":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        for option, key in zip(names, ("scaling_factor", *names[1:]), strict=True):
            translation.put(f"model.options.rope_{'scaling_' if option == 'factor' else ''}{option}", rope.get(key))
        translation.put("model.options.rope_original_length", rope.get("original_max_position_embeddings"))
    translation.put("model.options.tied", translation.boolean(f"{MODEL}enable_weight_tying"))
    if attention.get("qk_norm") is not None:
        translation.put("model.options.qk_norm", True)
    reason = "torchtitan's attention stays within a document since 2026; here the labels do, too"
    translation.put("data.document_boundaries", True, reason)
    translation.drop("model.hf_assets_path", DropReason.BY_HAND, TOKENIZER)
    translation.skip(f"{MODEL}*", "loss.*")
    return len(layers)


def _refuse_others(
    translation: Translation, layer: Mapping[str, Any], attention: Mapping[str, Any], mlp: Mapping[str, Any]
) -> None:
    """Refuse modules that Llama's options do not describe.

    Raises:
        ConfigError: names the module.
    """
    name = translation.items[NAME].value
    qkv, norm = _table(attention, "qkv_linear"), attention.get("qk_norm")
    linears = [
        *(_table(qkv, each) for each in ("wqkv", "wq", "wkv")),
        *(_table(mlp, each) for each in ("w1", "w2", "w3")),
    ]
    eps, heads = _table(layer, "attention_norm").get("eps", 1e-5), attention.get("n_heads")
    width, size = translation.value(f"{MODEL}dim"), attention.get("head_dim")
    if size is None and type(width) is int and type(heads) is int and heads > 0:
        size = width // heads
    problems = {
        "mixture of experts": bool(layer.get("moe")),
        "no attention of heads and groups": type(heads) is not int or not {"qkv_linear", "rope"} <= attention.keys(),
        "no SwiGLU": not {"w1", "w2", "w3"} <= mlp.keys() or "gate" in mlp,
        "biases": any(linear.get("bias") for linear in (*linears, _table(attention, "wo"))),
        "other positions than rotary ones, or those of Llama 3.1": _table(attention, "rope").get("scaling", "none")
        not in ("none", "llama"),
        "a sliding window": _table(attention, "inner_attention").get("window_size", [-1, 0]) not in ([-1, 0], (-1, 0)),
        "attention of another kind": bool({"sliding_window_size", "sinks", "q_lora_rank"} & attention.keys()),
        "norms of q and k with another epsilon": isinstance(norm, Mapping) and norm.get("eps", 1e-5) != eps,
        "a last norm with another epsilon": translation.value(f"{MODEL}norm.eps", eps) != eps,
        "rotary positions in a part of each head": _table(attention, "rope").get("dim", size) != size,
        "images or sound": any(key.startswith((f"{MODEL}vision", f"{MODEL}audio")) for key in translation.items),
    }
    what = next((what for what, is_so in problems.items() if is_so), None)
    if what is not None:
        raise translation.unsupported_model(NAME, f"{what} ({name})")
    if isinstance(translation.value(GROUP), list) and len(translation.value(GROUP)) != 1:
        raise ConfigError(
            "MW-INTEROP-093",
            f"{translation.place(GROUP)}: one group of parameters is read, with one optimizer for all of them",
        )


def _sizes(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Return a layer without the functions of its initial weights, which depend on its number."""
    return {
        key: _sizes(value) if isinstance(value, Mapping) else value
        for key, value in layer.items()
        if key != "param_init"
    }


def _table(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    inner = table.get(name)
    return inner if isinstance(inner, Mapping) else {}
