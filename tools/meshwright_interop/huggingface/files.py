"""File names of a Hugging Face model directory; reading,
writing and copying of its JSON and tokenizer files.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from meshwright.errors import ModelError
from meshwright.system.atomic import leads_elsewhere
from meshwright.system.bounded import parse_json, read_bytes

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION = "generation_config.json"
TOKENIZER_FILES = (
    TOKENIZER,
    TOKENIZER_CONFIG,
    GENERATION,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
)
"""Tokenizer and generation files, copied unchanged along with the weights."""

SAME_MODELS = {"kimi_k2": "deepseek_v3"}
"""``model_type`` of files with code of their own -> that of the same model in transformers."""
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Supported element types of weights: name in a safetensors header -> torch dtype."""


def read_config(path: Path, origin: str = "") -> dict[str, Any]:
    """Return the fields of a directory's config.json.

    ``origin``: prefix of the error messages about the path, such as the option that named it.

    Raises:
        ModelError: the file is missing, or it is no JSON object.
    """
    if not path.exists():
        name = path if len(path.parts) == 2 and not path.is_absolute() else "NAME"
        raise ModelError(
            "MW-INTEROP-044",
            f"{origin}there is no directory"
            f" {path}{'' if path.is_absolute() else f' in {Path.cwd()}'}, and meshwright opens no"
            f" network: download it first (hf download {name} --local-dir DIRECTORY), and give that"
            " directory",
        )
    if not path.is_dir():
        raise ModelError(
            "MW-INTEROP-045",
            f"{origin}{path} is a file: give the directory that it lies in, with its {CONFIG}",
        )
    if (path / ADAPTER).is_file() and not (path / CONFIG).is_file():
        raise ModelError(
            "MW-INTEROP-046",
            f"{origin}{path} holds an adapter ({ADAPTER}) and not a model: merge it into its model"
            " first, with peft's merge_and_unload() and save_pretrained(), and take the written"
            " directory",
        )
    fields = read_json(
        path / CONFIG, f"{origin}a directory of a model in Hugging Face's form has one"
    )
    return with_known_type(fields)


def with_known_type(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a config.json with the ``model_type`` that transformers has."""
    kind = fields.get("model_type")
    if isinstance(kind, str) and kind in SAME_MODELS:
        return fields | {"model_type": SAME_MODELS[kind]}
    return fields


def read_json(path: Path, why: str) -> dict[str, Any]:
    """Read one JSON object. ``why``: reason in the error message when the file is missing."""
    if not path.is_file():
        raise ModelError("MW-INTEROP-047", f"{path} is missing: {why}")
    try:
        text = read_bytes(path)
        fields = parse_json(text)
        if b"\\u" in text:
            json.dumps(fields, ensure_ascii=False).encode()  # raises for half a surrogate pair
    except UnicodeEncodeError as error:
        half = error.object[error.start : error.end].encode("unicode_escape").decode()
        raise ModelError(
            "MW-INTEROP-126",
            f"{path}: {half} is half a character, which no file can hold; get the file again",
        ) from None
    except ValueError as error:
        raise ModelError(
            "MW-INTEROP-048", f"{path}: not valid JSON: {error}; get the file again"
        ) from None
    except OSError as error:
        raise ModelError(
            "MW-INTEROP-049", f"{path}: {error.strerror} (errno {error.errno})"
        ) from None
    if not isinstance(fields, dict):
        raise ModelError("MW-INTEROP-050", f"{path}: not a JSON object; get the file again")
    return fields


def write_json(path: Path, fields: dict[str, Any]) -> None:
    """Write a JSON object in the format of transformers: indented by two spaces,
    a newline at the end.
    """
    path.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def copy_side_files(source: Path, target: Path) -> list[str]:
    """Copy the files of ``TOKENIZER_FILES`` that exist in ``source`` to ``target``,
    and return their names.

    Raises:
        ModelError: one is a link to a file of another name outside of the directory: a run and its
            exports would hold a private file of this machine.
    """
    names = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    for name in names:
        if (end := leads_elsewhere(source / name)) is not None:
            raise ModelError(
                "MW-INTEROP-127",
                f"{source / name} is a link to {end}, a file of another name: put the file itself"
                " there, or remove it",
            )
    target.mkdir(parents=True, exist_ok=True)
    for name in names:
        shutil.copyfile(source / name, target / name)
    return names
