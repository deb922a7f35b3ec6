"""Import of peft's adapters onto a model of ours whose linears are fused (qkv, gate_up): a run directory.

    theirs   q_proj B_q A_q, k_proj B_k A_k, v_proj B_v A_v            A (r, I), B (rows of each, r)
    ours     qkv    [B_q  0   0 ; 0  B_k  0 ; 0   0  B_v] [A_q ; A_k ; A_v]     rank 3 r, the same function
    or       qkv    [B_q ; B_k ; B_v] A                                if all have one A: rank r, as an export writes it

The rows of B have the order of the fused weight's rows, and so do the magnitudes of DoRA. A run has one rank: smaller
factors are padded with zeros, which add nothing and get no gradient. The base comes from a run directory, usually one
that ``convert --from hf`` wrote.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.adapters.attach import A, B, is_adapter
from meshwright.adapters.magnitude import MAGNITUDE, row_lengths
from meshwright.checkpoint import TensorKind, TensorPiece
from meshwright.checkpoint.files import final_directory
from meshwright.checkpoint.manifest import MANIFEST
from meshwright.config import RunConfig, given_keys, load_saved, parse, resolve
from meshwright.errors import ModelError
from meshwright.model.build import build_model
from meshwright.parameters import ParameterInfo
from meshwright.run.directory import check_own_directory
from meshwright_interop.huggingface.adapters import CONFIG, PREFIX, TENSORS
from meshwright_interop.huggingface.convert import side_files
from meshwright_interop.huggingface.convert.exporting import plan_export
from meshwright_interop.huggingface.destination import check_output_directory, published_directory
from meshwright_interop.huggingface.export import open_verified
from meshwright_interop.huggingface.files import CONFIG as CONFIG_OF_MODEL
from meshwright_interop.huggingface.files import DTYPES, copy_side_files, read_json, write_json
from meshwright_interop.huggingface.peft_files import (
    AdapterSettings,
    ImportedAdapter,
    settings_of,
    write_run,
)
from meshwright_interop.huggingface.rules import TensorMapping
from meshwright_interop.huggingface.source import open_source

Pairs = Mapping[str, tuple[Tensor, ...]]
"""Module of transformers -> A (rank, I) and B (O, rank), and with DoRA magnitudes (O,). An embedding (V, D) has
A (rank, V) and B (D, rank)."""


class FusedAdapter(NamedTuple):
    """Adapter of one module of ours."""

    down: Tensor
    """A (rank, I)."""
    up: Tensor
    """B (O, rank)."""
    rule: TensorMapping
    """Rule of its weight."""
    magnitudes: Mapping[str, Tensor]
    """Weight of transformers -> magnitudes, with DoRA."""

    def padded(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return the factors of the same product with a larger rank."""
        more = rank - len(self.down)
        return nn.functional.pad(self.down, (0, 0, 0, more)), nn.functional.pad(self.up, (0, more))

    def magnitude_offsets(self, weight: Tensor) -> Tensor:
        """Return DoRA's magnitudes minus the row norms of the base's weight (O, I): (O,)."""
        rule, rows = self.rule._replace(transposed=False), len(weight)
        parts = dict(rule.split(row_lengths(weight).unsqueeze(1)))

        def read(theirs: str) -> Tensor:
            found = self.magnitudes.get(theirs)
            return torch.zeros_like(parts[theirs]) if found is None else found.double().unsqueeze(1) - parts[theirs]

        dtype = torch.promote_types(self.up.dtype, torch.float32)
        return rule.join(read, (rows, 1), torch.float64).squeeze(1).to(dtype)


def import_fused(source: Path, out: Path, base: Path, overrides: Sequence[str] = ()) -> ImportedAdapter:
    """Import the adapters in ``source`` as a run directory with the weights of ``base``.

    Args:
        source: directory that peft has written.
        out: the run directory to write, new or empty.
        base: a run directory or a checkpoint of a model of ours, without adapters.
        overrides: configuration overrides, which go into its config.toml.

    Raises:
        ConfigError, ModelError, CheckpointError: the adapters are not supported, or do not fit the base. Nothing is
            written then.
    """
    out, settings = check_output_directory(out), settings_of(read_json(source / CONFIG, "peft writes it"), source)
    with open_verified(base) as checkpoint:
        saved = parse(json.dumps(checkpoint.manifest.config), f"{checkpoint.path}/{MANIFEST}")
        names = checkpoint.parameters(TensorKind.WEIGHTS)
        plan = plan_export(saved, checkpoint.path)
        has_factors = any(factor != 1 for rule in plan.rules for factor in rule.factors)
        if has_factors or any(map(is_adapter, names)):
            why = "has muP multipliers, which an export folds in" if has_factors else "has adapters already"
            raise ModelError("MW-INTEROP-111", f"{checkpoint.path} {why}: --base takes a plain model")
        layers = build_model(saved.model.builder, saved.model.options, saved.run.seed).layers
        fused = dict(_fused(_pairs(source, settings), plan.rules, layers, source))
        rank = max(len(each.down) for each in fused.values())
        config = _config(saved, settings, sorted(fused), rank, out, overrides)
        factors = {
            f"{target}.{name}.weight": factor
            for target, each in fused.items()
            for name, factor in zip((A, B), each.padded(rank), strict=True)
        }
        tables = {f"{name}.{A}.weight" for name in fused if isinstance(layers.get_submodule(name), nn.Embedding)}

        def pieces() -> Iterator[TensorPiece]:
            for name in names:
                info = ParameterInfo(name, checkpoint.shape(TensorKind.WEIGHTS, name))
                weight = checkpoint.read(TensorKind.WEIGHTS, info)
                assert weight is not None, name
                yield TensorPiece(TensorKind.WEIGHTS, info, weight)
                each = fused.get(name.removesuffix(".weight"))
                if settings.dora and each is not None and name.endswith(".weight"):
                    added = each.magnitude_offsets(weight)
                    info = ParameterInfo(f"{name.removesuffix('weight')}{MAGNITUDE}", tuple(added.shape))
                    yield TensorPiece(TensorKind.WEIGHTS, info, added)
            for name, factor in factors.items():
                whole = (factor.t() if name in tables else factor).contiguous()
                yield TensorPiece(TensorKind.WEIGHTS, ParameterInfo(name, tuple(whole.shape)), whole)

        num_bytes = sum(file.stat().st_size for file in checkpoint.path.iterdir())
        with published_directory(out, num_bytes + sum(each.nbytes for each in factors.values())) as temporary:
            write_run(temporary, config, pieces(), f"Adapters of {source.name} beside the weights of {base}")
            beside = side_files.side_file_directory(checkpoint.path.parent.parent, saved)
            if beside is not None and beside.name == side_files.DIRECTORY:
                copy_side_files(beside, temporary / side_files.DIRECTORY)
                if (beside / CONFIG_OF_MODEL).is_file():
                    fields = read_json(beside / CONFIG_OF_MODEL, "")
                    write_json(temporary / side_files.DIRECTORY / CONFIG_OF_MODEL, fields)
    return ImportedAdapter(final_directory(out, 0), resolve(config), len(fused))


def _config(
    saved: RunConfig, settings: AdapterSettings, targets: list[str], rank: int, out: Path, overrides: Sequence[str]
) -> RunConfig:
    """Return the configuration of the run: model and data of the base, the adapters, and defaults for the rest."""
    dumped = saved.model_dump(mode="json", exclude_defaults=True)
    tree: dict[str, Any] = {
        "run": {"name": out.name, "directory": str(out.parent)},
        "model": {name: dumped["model"][name] for name in ("builder", "options") if name in dumped["model"]},
        "data": {} if ("data", "builder") in {key[:2] for key in given_keys(overrides)} else dumped.get("data", {}),
        "adapter": {
            "rank": rank,
            "alpha": settings.factor * rank,
            "targets": targets,
            "dropout": settings.dropout,
            "dora": settings.dora,
        },
        "batch": {"micro_batch_size": 1, "global_batch": 16},
        "optimizer": {"learning_rate": 1e-4, "weight_decay": 0.0},
        "train": {"dtype": saved.train.dtype},
    }
    config = load_saved(tree, overrides, f"the run {out}")
    check_own_directory(config, out)
    return config


def _pairs(source: Path, settings: AdapterSettings) -> Pairs:
    """Return A and B, and with DoRA the magnitudes, of each module of transformers.

    Raises:
        ModelError: the file is missing, a factor has no partner, or they do not have the rank of the configuration.
    """
    found = open_source(source, single=TENSORS)
    if found is None:
        raise ModelError("MW-INTEROP-112", f"{source / TENSORS} is missing: it holds the adapters' weights")
    factors: dict[str, dict[str, Tensor]] = {}
    for name in sorted(found.tensors):
        if found.tensors[name].dtype not in DTYPES:
            raise ModelError(
                "MW-INTEROP-124",
                f"{source / TENSORS}: {name} is of {found.tensors[name].dtype}: only {', '.join(DTYPES)} are read",
            )
        module, _, which = name.removeprefix(PREFIX).partition(".lora_")
        which = which.removesuffix(".weight").removeprefix("embedding_")
        factors.setdefault(module, {})[which] = found.read(name)
    for module, each in factors.items():
        fits = set(each) == settings.kinds and all(each[kind].dim() == (2 if kind in "AB" else 1) for kind in each)
        if not fits or len(each["A"]) != settings.rank or each["B"].shape[1] != settings.rank:
            raise ModelError(
                "MW-INTEROP-113",
                f"{source / TENSORS}: {module} does not have A and B of rank {settings.rank}: is it the file that "
                f"belongs to {CONFIG}?",
            )
    return {module: tuple(each[kind] for kind in sorted(settings.kinds)) for module, each in factors.items()}


def _fused(
    pairs: Pairs, rules: Sequence[TensorMapping], layers: nn.Module, source: Path
) -> Iterator[tuple[str, FusedAdapter]]:
    """Yield the name and the adapter of each module of ours.

    Raises:
        ModelError: a module of theirs is no linear or embedding of the base, or has other sizes.
    """
    shapes = {name: tuple(each.shape) for name, each in layers.named_parameters(remove_duplicate=False)}
    left = dict(pairs)
    for rule in rules:
        modules = [name.removesuffix(".weight") for name in rule.theirs]
        present = {name: left.pop(name) for name in modules if name in left}
        if not present:
            continue
        target = rule.ours.removesuffix(".weight")
        module = None if rule.place is not None else layers.get_submodule(target)
        if not isinstance(module, nn.Linear | nn.Embedding):
            raise ModelError(
                "MW-INTEROP-123",
                f"{source / TENSORS}: {min(present)} belongs to {rule.ours}; only linears and embeddings have "
                f"adapters: merge it into the base with peft, or leave it out",
            )
        is_table = isinstance(module, nn.Embedding)
        rows, columns = shapes[rule.ours][::-1] if is_table else shapes[rule.ours]
        sizes = rule._replace(transposed=False).shapes((rows, 1))
        for name, (down, up, *more) in present.items():
            num_rows = rows if is_table else sizes[f"{name}.weight"][0]
            num_magnitudes = [columns if is_table else num_rows for _ in more]
            if (down.shape[1], up.shape[0], *map(len, more)) != (columns, num_rows, *num_magnitudes):
                of_dora = "".join(f", magnitudes {list(each.shape)}" for each in more)
                raise ModelError(
                    "MW-INTEROP-114",
                    f"{source / TENSORS}: A {list(down.shape)} and B {list(up.shape)}{of_dora} of {name} do not fit "
                    f"{rule.ours} {list(shapes[rule.ours])}: is it the model that they were trained on?",
                )
        down, up = _joined(rule, present, rows)
        magnitudes = {f"{name}.weight": each for name, (_, _, *more) in present.items() for each in more}
        yield target, FusedAdapter(down, up, rule, magnitudes)
    if left:
        raise ModelError("MW-INTEROP-115", f"{source / TENSORS}: {min(left)} belongs to no module of the base")


def _joined(rule: TensorMapping, present: Pairs, rows: int) -> tuple[Tensor, Tensor]:
    """Join the factors of transformers modules into A and B of our fused module, which has ``rows`` rows."""
    first, *_ = next(iter(present.values()))
    width, is_one = len(first), all(torch.equal(down, first) for down, *_ in present.values())
    downs = [first] if is_one else [down for down, *_ in present.values()]
    places = {name: 0 if is_one else index * width for index, name in enumerate(present)}
    dtypes = [factor.dtype for down, up, *_ in present.values() for factor in (down, up)]
    dtype = functools.reduce(torch.promote_types, dtypes)
    straight = rule._replace(transposed=False)
    shapes = straight.shapes((rows, len(downs) * width))

    def read(theirs: str) -> Tensor:
        name, whole = theirs.removesuffix(".weight"), torch.zeros(shapes[theirs], dtype=dtype)
        if name in present:
            whole[:, places[name] : places[name] + width] = present[name][1]
        return whole

    return torch.cat(downs).to(dtype), straight.join(read, (rows, len(downs) * width), dtype)
