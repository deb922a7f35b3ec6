"""A model of Hugging Face as it lies in a directory: its configuration, and its weights tensor by tensor."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from framework.errors import ModelError
from framework.huggingface.library import library

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def read_config(path: Path, overrides: Mapping[str, Any]) -> Any:
    """The transformers configuration of ``path``, keys of ``overrides`` (``model.options``) in the place of its own.

    Raises:
        ModelError: no directory with a configuration of a causal language model that transformers itself knows.
    """
    raw = read_json(path)
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


def read_json(path: Path) -> dict[str, Any]:
    """``config.json`` as it stands there."""
    if not path.is_dir():
        hub = f"meshwright opens no network: download it first (huggingface-cli download {path} --local-dir DIRECTORY)"
        what = "is a file: name the directory that holds it" if path.exists() else f"is no directory here; {hub}"
        raise ModelError(f'model.builder = "hf:{path}": {path} {what}')
    file = path / CONFIG
    try:
        found = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise ModelError(
            f'model.builder = "hf:{path}": there is no {CONFIG} in it, so it is no directory of a transformers model'
        ) from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{file}: holds a {type(found).__name__} instead of a table of keys")
    return found


def vocabulary(path: str) -> int | None:
    """``vocab_size`` of the configuration in ``path``; None where it says nothing. Needs no transformers."""
    found = read_json(Path(path).expanduser()).get("vocab_size")
    return found if isinstance(found, int) else None


class Weights:
    """The tensors of a directory's safetensors files, by the names of transformers; mapped, and read one at a time."""

    def __init__(self, path: Path, files: Mapping[str, str]) -> None:
        self.path = path
        self.files = files
        """Tensor -> file."""
        self._open: dict[str, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def shape(self, name: str) -> tuple[int, ...]:
        """Out of the header of its file."""
        return tuple(self._file(name).get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        """The whole tensor, as stored.

        Raises:
            ModelError: the file has lost it.
        """
        try:
            found = self._file(name).get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"{self.path / self.files[name]}: tensor {name} cannot be read: {error}") from error
        assert isinstance(found, Tensor)
        return found

    def _file(self, name: str) -> Any:
        file = self.files[name]
        if file not in self._open:
            try:
                self._open[file] = safe_open(self.path / file, framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{self.path / file} cannot be read: {error}: download it again") from error
        return self._open[file]

    def check(self, shapes: Mapping[str, tuple[int, ...]], ignored: Iterable[str], overridden: bool) -> None:
        """Compare with what the model has. ``ignored``: names that mean nothing to it. ``overridden``: the model is
        not the one of the files, which may then hold more.

        Raises:
            ModelError: tensors that are missing, of another shape, of no floating-point dtype, or unknown.
        """
        missing = [name for name in shapes if name not in self]
        if missing:
            raise ModelError(
                f"{self.path}: its files have no tensor {missing[0]} ({len(missing)} of {len(shapes)} are missing); "
                f"they have {', '.join(list(self.files)[:3])}, ...: download them again, or set model.options.weights "
                f"= false to begin with fresh ones"
            )
        for name, shape in shapes.items():
            if self.shape(name) != shape:
                raise ModelError(
                    f"{self.path / self.files[name]}: {name} has shape {list(self.shape(name))}, and the model "
                    f"{list(shape)}: leave model.options as they are in {CONFIG}, or set model.options.weights = false"
                )
        extra = [name for name in self.files if name not in shapes and name not in set(ignored)]
        if extra and not overridden:
            raise ModelError(
                f"{self.path / self.files[extra[0]]}: the model has no parameter for {extra[0]} ({len(extra)} such "
                f"tensors): the files are of another model than {CONFIG}, or transformers reads them in a way that is "
                f"not known here. Load and save_pretrained it with transformers, and take that directory"
            )


def open_weights(path: Path) -> Weights | None:
    """The weights of a directory; None where there are none.

    Raises:
        ModelError: they are there in a form that is not read, or files of the index are missing.
    """
    if (path / INDEX).is_file():
        try:
            files = json.loads((path / INDEX).read_text())["weight_map"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{path / INDEX} cannot be read: {type(error).__name__}: {error}") from error
        absent = sorted({file for file in files.values() if not (path / file).is_file()})
        if absent:
            raise ModelError(f"{path}: {INDEX} names {len(absent)} files that are not there: {', '.join(absent[:5])}")
        return Weights(path, files)
    if (path / SINGLE).is_file():
        try:
            with safe_open(path / SINGLE, framework="pt", device="cpu") as file:
                return Weights(path, dict.fromkeys(file.keys(), SINGLE))
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path / SINGLE} cannot be read: {error}: download it again") from error
    pickled = sorted(file.name for file in path.iterdir() if file.suffix in (".bin", ".pt", ".pth"))
    if pickled:
        raise ModelError(
            f"{path}: its weights are pickled ({pickled[0]}), and a pickle can run code: load it with transformers and "
            f"save_pretrained, which writes safetensors; or set model.options.weights = false for fresh ones"
        )
    return None


def as_float32(tensor: Tensor, name: str, path: Path) -> Tensor:
    """A stored weight as it is trained from: every value of it is a float32.

    Raises:
        ModelError: it is no plain floating-point tensor, or of float64.
    """
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ModelError(f"{path}: {name} is stored as {tensor.dtype}; taken are float32, bfloat16 and float16")
    return tensor.float()
