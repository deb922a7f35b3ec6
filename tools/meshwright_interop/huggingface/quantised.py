"""Quantised weights of a released model, dequantised as they are read: float32, by transformers' own
formulas.

    quant_method   tensors of the files                                values
    "fp8"          X               float8_e4m3fn    (..., R, C)        X  (..., R, C)
                   X_scale_inv     one per block    (..., R/r, C/c)      = X x its block's scale
    "mxfp4"        X_blocks        two e2m1 a byte  (E, R, G, 16)      X  (E, 32 G, R)
                   X_scales        e8m0 exponents   (E, R, G)            = e2m1 x 2 ** (scale - 127)

The last blocks of a row or a column may be cut off (R/r and C/c are rounded up), as in DeepSeek-V3.
A scale that is missing, too many or of another shape is found in the headers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.errors import ModelError
from meshwright_interop.huggingface.files import CONFIG
from meshwright_interop.huggingface.source import (
    EncodedValues,
    SafetensorsDirectory,
    TensorLocation,
)

QUANTISATION = "quantization_config"
LARGEST_BLOCK = 2**16
SCALES = ("F32", "BF16", "F16")
"""Element types of the scales of float8 blocks."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BLOCK_BYTES = 16
"""Bytes of the 32 numbers that share an exponent in MXFP4."""
MOST_PROBLEMS = 20
REMEDIES = {
    "bitsandbytes": "open it with transformers, model.dequantize() and save_pretrained",
    "compressed-tensors": "open it with transformers and"
    " CompressedTensorsConfig(run_compressed=False), and save_pretrained",
}
"""Method -> how to get plain weights; of the others the original directory is the way."""


class Quantisation(NamedTuple):
    """Method by which the weights of a directory are quantised."""

    method: str
    """"fp8" or "mxfp4"."""
    block: tuple[int, int]
    """Rows and columns that share a scale."""

    def __str__(self) -> str:
        return f"{self.method} in blocks of {self.block[0]} x {self.block[1]}"


def quantisation_of(fields: Mapping[str, Any], place: str) -> Quantisation | None:
    """Return the quantisation of a config.json; None: its weights are plain.

    Args:
        fields: those of the config.json.
        place: its path, for messages.

    Raises:
        ModelError: it is of a method, or of a form, that is not read.
    """
    raw = fields.get(QUANTISATION)
    if not raw:
        return None
    method = raw.get("quant_method", "some way") if isinstance(raw, dict) else raw
    if method == "mxfp4":
        return Quantisation("mxfp4", (1, 2 * BLOCK_BYTES))
    if method != "fp8":
        remedy = REMEDIES.get(
            str(method), "take the original directory, that of the model before it was quantised"
        )
        raise ModelError(
            "MW-INTEROP-053",
            f"{place}: the weights are quantised ({str(method)[:80]}): only fp8 in blocks and mxfp4"
            f" are dequantised here; {remedy}",
        )
    block = raw.get("weight_block_size")
    others = {"activation_scheme": "dynamic", "fmt": "e4m3"}
    wrong = next((name for name, only in others.items() if raw.get(name, only) != only), None)
    if not _is_block(block):
        wrong = "weight_block_size"
    if wrong is not None:
        raise ModelError(
            "MW-INTEROP-174",
            f"{place}: {QUANTISATION}.{wrong} = {str(raw.get(wrong))[:80]}: read is fp8 in the form"
            ' e4m3 with a scale for each block, such as "weight_block_size": [128, 128], and'
            ' "activation_scheme": "dynamic"; take the directory of the model in bfloat16',
        )
    return Quantisation("fp8", (block[0], block[1]))


def _is_block(value: Any) -> bool:
    """Return whether a value is two sizes of a block."""
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(type(size) is int and 1 <= size <= LARGEST_BLOCK for size in value)
    )


def with_values(
    source: SafetensorsDirectory, quantisation: Quantisation | None
) -> SafetensorsDirectory:
    """Return the tensors of a directory with dequantised ones in place of codes and scales.

    Reads no more than the headers, which ``source`` has.

    Raises:
        ModelError: codes or scales are missing, too many, or of another shape or element type; a
            line each, at most 20.
    """
    if quantisation is None:
        return source
    pair = _pair_fp8 if quantisation.method == "fp8" else _pair_mxfp4
    tensors = dict(source.tensors)
    problems: list[str] = []
    for name, codes, scales in _pairs(source.tensors, quantisation.method):
        found = pair(source, name, codes, scales, quantisation.block)
        if isinstance(found, str):
            problems.append(found)
            continue
        for key in (codes, scales):
            tensors.pop(key)
        if name in tensors:
            problems.append(
                f"{found.file}: {name} is there quantised, and in"
                f" {tensors[name].file.name} as it is: remove one of the two"
            )
        tensors[name] = found
    if problems:
        more = f"\nand {len(problems) - MOST_PROBLEMS} more" if problems[MOST_PROBLEMS:] else ""
        raise ModelError(
            "MW-INTEROP-175",
            "\n".join(problems[:MOST_PROBLEMS])
            + f"{more}\n{source.path / CONFIG} says that the weights are {quantisation}: get these"
            " files again",
        )
    return SafetensorsDirectory(source.path, tensors)


def note_of(
    source: SafetensorsDirectory | None,
    quantisation: Quantisation | None,
    left_over: Collection[str] = (),
) -> str:
    """Return a line on the tensors that are dequantised; empty: there are none.

    ``left_over``: names of tensors that the model does not have.
    """
    if source is None or quantisation is None:
        return ""
    encoded = {name for name, each in source.tensors.items() if each.encoded is not None}
    number = len(encoded - set(left_over))
    return f"{number:,} tensors of {source.path} are dequantised to float32: {quantisation}"


def _pairs(tensors: Mapping[str, TensorLocation], method: str) -> Iterator[tuple[str, str, str]]:
    """Yield the name of each quantised tensor, of its codes and of its scales, each of which may be
    in none of the files.
    """
    code_end, scale_end = ("", "_scale_inv") if method == "fp8" else ("_blocks", "_scales")
    names = dict.fromkeys(
        name.removesuffix(scale_end) for name in tensors if name.endswith(scale_end)
    )
    if method == "fp8":
        names |= dict.fromkeys(name for name, each in tensors.items() if each.dtype == "F8_E4M3")
    else:
        ends = (name for name in tensors if name.endswith(code_end))
        names |= dict.fromkeys(name.removesuffix(code_end) for name in ends)
    for name in names:
        yield name, f"{name}{code_end}", f"{name}{scale_end}"


def _pair_fp8(
    source: SafetensorsDirectory, name: str, codes: str, scales: str, block: tuple[int, int]
) -> TensorLocation | str:
    """Return a float8 tensor with its scales as one of float32, or what is wrong with the two."""
    stored, beside = source.tensors.get(codes), source.tensors.get(scales)
    if stored is None:
        assert beside is not None
        return f"{beside.file}: {scales} are the scales of {codes}, which is in none of the files"
    if stored.dtype != "F8_E4M3" or len(stored.shape) not in (2, 3):
        return (
            f"{stored.file}: {codes} is {stored.dtype} {list(stored.shape)} and has scales"
            f" ({scales}): a matrix of F8_E4M3, or a stack of them, is needed"
        )
    *stack, rows, columns = stored.shape
    shape = (*stack, math.ceil(rows / block[0]), math.ceil(columns / block[1]))
    if beside is None:
        return f"{stored.file}: {codes} is F8_E4M3, and its scales {scales} {list(shape)} are in none of the files"
    if beside.dtype not in SCALES or beside.shape != shape:
        return (
            f"{beside.file}: {scales} is {beside.dtype} {list(beside.shape)}, and {codes}"
            f" {list(stored.shape)} needs {list(shape)} of {', '.join(SCALES)}"
        )
    values = EncodedValues(stored, beside, partial(from_fp8, block=block))
    return stored._replace(key=name, dtype="F32", encoded=values)


def _pair_mxfp4(
    source: SafetensorsDirectory, name: str, codes: str, scales: str, block: tuple[int, int]
) -> TensorLocation | str:
    """Return a tensor of MXFP4 with its scales as one of float32, or what is wrong with the two."""
    stored, beside = source.tensors.get(codes), source.tensors.get(scales)
    if stored is None or beside is None:
        here, missing = (codes, scales) if beside is None else (scales, codes)
        return f"{source.tensors[here].file}: {here} needs {missing}, which is in none of the files"
    if stored.dtype != "U8" or len(stored.shape) != 4 or stored.shape[3] != BLOCK_BYTES:
        return (
            f"{stored.file}: {codes} is {stored.dtype} {list(stored.shape)}: U8 [experts, rows,"
            f" blocks, {BLOCK_BYTES}] is needed"
        )
    if beside.dtype != "U8" or beside.shape != stored.shape[:3]:
        return (
            f"{beside.file}: {scales} is {beside.dtype} {list(beside.shape)}, and {codes} needs U8"
            f" {list(stored.shape[:3])}"
        )
    experts, rows, blocks, _ = stored.shape
    shape = (experts, blocks * block[1], rows)
    values = EncodedValues(stored, beside, from_mxfp4)
    return stored._replace(key=name, dtype="F32", shape=shape, encoded=values)


def from_fp8(codes: Tensor, scales: Tensor, *, block: tuple[int, int]) -> Tensor:
    """Return the values of float8 codes: each times the scale of its block.

    Args:
        codes: (..., R, C) float8_e4m3fn.
        scales: (..., ceil(R / r), ceil(C / c)).
        block: r and c.

    Returns:
        (..., R, C) float32.
    """
    rows, columns = codes.shape[-2:]
    width = block[1]
    whole, rest = divmod(columns, width)
    # a block may be larger than the matrix: no more rows than it has are ever made
    height = min(block[0], max(rows, 1))
    by_row = scales.float().repeat_interleave(height, dim=-2)[..., :rows, :]  # (..., R, C/c)
    values = codes.float()
    if whole:
        of_blocks = torch.unflatten(values[..., : whole * width], -1, (whole, width))
        of_blocks.mul_(by_row[..., :whole, None])
    if rest:
        values[..., whole * width :].mul_(by_row[..., whole:])
    return values


def from_mxfp4(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the values of MXFP4 codes, transposed as gpt-oss' modules have them.

    Args:
        codes: (E, R, G, 16) uint8; the first number of each two is in the low bits.
        scales: (E, R, G) uint8, exponents of two plus 127.

    Returns:
        (E, 32 G, R) float32.
    """
    numbers = torch.tensor([*E2M1, *(-number for number in E2M1)])
    pairs = torch.stack((numbers.repeat(16), numbers.repeat_interleave(16)), dim=1)  # of each byte
    values = pairs[codes.int()].flatten(-2)  # (E, R, G, 32)
    values.ldexp_(scales.int()[..., None] - 127)
    return values.flatten(-2).transpose(1, 2).contiguous()
