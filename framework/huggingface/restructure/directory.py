"""What transformers makes of a directory's config.json, and what its weights have to be; what is refused of both."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from framework.errors import ModelError
from framework.huggingface.files import CONFIG, read_config
from framework.huggingface.restructure.library import library
from framework.huggingface.source import Source, open_source, pickled


def configuration(path: Path, overrides: Mapping[str, Any]) -> Any:
    """The transformers configuration of ``path``, keys of ``overrides`` (``model.options``) in the place of its own.

    Raises:
        ModelError: no directory with a configuration of a causal language model that transformers itself knows.
    """
    raw = fields_of(path)
    transformers = library()
    kind = raw.get("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        code = raw.get("auto_map") or {}
        own = f", and code of its own ({', '.join(map(str, code.values()))}), which is not run" if code else ""
        close = difflib.get_close_matches(str(kind), list(transformers.CONFIG_MAPPING), 1)
        raise ModelError(
            f"{path / CONFIG}: model_type = {kind!r} is no architecture of transformers "
            f"{transformers.__version__}{own}{f'; did you mean {close[0]!r}?' if close else ''}. Update transformers, "
            f"or bring the model as code (docs/huggingface-models.md)"
        )
    if raw.get("is_encoder_decoder"):
        raise ModelError(
            f"{path / CONFIG}: {kind} is an encoder-decoder; restructured are causal language models, whose plan has "
            f"one chain of layers. For T5 there is models.t5:build"
        )
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "some way")
        raise ModelError(
            f"{path / CONFIG}: the weights are quantized ({method}), and training starts from plain ones: take the "
            f"directory that they were made from, or dequantize them with transformers and save_pretrained"
        )
    kind_of_config = transformers.CONFIG_MAPPING[kind]
    known = {*vars(kind_of_config()), *raw, *getattr(kind_of_config, "attribute_map", {})}
    unknown = [name for name in overrides if name not in known]
    if unknown:
        close = difflib.get_close_matches(unknown[0], known, 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ModelError(f"model.options.{unknown[0]}: the configuration of {kind} has no such key{hint}")
    merged = raw | dict(overrides)
    layers = merged.get("num_hidden_layers")
    if isinstance(merged.get("layer_types"), list) and isinstance(layers, int) and "layer_types" not in overrides:
        merged["layer_types"] = merged["layer_types"][:layers]
    try:
        return kind_of_config.from_dict(merged)
    except Exception as error:
        raise ModelError(f"{path / CONFIG}: transformers does not take it: {error}") from error


def fields_of(path: Path) -> dict[str, Any]:
    """``config.json`` as it stands there."""
    return read_config(path, f'model.builder = "hf:{path}": ')


def vocabulary(path: str) -> int | None:
    """``vocab_size`` of the configuration in ``path``; None where it says nothing. Needs no transformers."""
    found = fields_of(Path(path).expanduser()).get("vocab_size")
    return found if isinstance(found, int) else None


def open_weights(path: Path) -> Source | None:
    """The weights of a directory; None where there are none.

    Raises:
        ModelError: they are there in a form that is not read, or damaged.
    """
    source = open_source(path)
    found = [] if source is not None else pickled(path)
    if found:
        raise ModelError(
            f"{path}: its weights are pickled ({found[0]}), and a pickle can run code: load it with transformers and "
            f"save_pretrained, which writes safetensors; or set model.options.weights = false for fresh ones"
        )
    return source


def check_weights(
    source: Source, shapes: Mapping[str, tuple[int, ...]], ignored: Iterable[str], overridden: bool
) -> None:
    """Compare the files with what the model has. ``ignored``: names that mean nothing to it. ``overridden``: the model
    is not the one of the files, which may then hold more.

    Raises:
        ModelError: tensors that are missing, of another shape, or unknown.
    """
    there = source.tensors
    missing = [name for name in shapes if name not in there]
    if missing:
        raise ModelError(
            f"{source.path}: its files have no tensor {missing[0]} ({len(missing)} of {len(shapes)} are missing); "
            f"they have {', '.join(list(there)[:3])}, ...: download them again, or set model.options.weights "
            f"= false to begin with fresh ones"
        )
    for name, shape in shapes.items():
        if there[name].shape != shape:
            raise ModelError(
                f"{there[name].file}: {name} has shape {list(there[name].shape)}, and the model "
                f"{list(shape)}: leave model.options as they are in {CONFIG}, or set model.options.weights = false"
            )
    extra = [name for name in there if name not in shapes and name not in set(ignored)]
    if extra and not overridden:
        raise ModelError(
            f"{there[extra[0]].file}: the model has no parameter for {extra[0]} ({len(extra)} such "
            f"tensors): the files are of another model than {CONFIG}, or transformers reads them in a way that is "
            f"not known here. Load and save_pretrained it with transformers, and take that directory"
        )


def as_float32(tensor: Tensor, name: str, path: Path) -> Tensor:
    """A stored weight as it is trained from: every value of it is a float32.

    Raises:
        ModelError: it is no plain floating-point tensor, or of float64.
    """
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ModelError(f"{path}: {name} is stored as {tensor.dtype}; taken are float32, bfloat16 and float16")
    return tensor.float()
