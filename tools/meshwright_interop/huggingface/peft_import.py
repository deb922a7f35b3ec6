"""Import of peft's adapters as a run directory: beside an ``hf:DIRECTORY`` model, or onto the
weights of a run of ours, whose linears are fused (qkv, gate_up).

    theirs   q_proj B_q A_q, k_proj B_k A_k, v_proj B_v A_v            A (r, I), B (rows of each, r)
    ours     qkv    [B_q  0   0 ; 0  B_k  0 ; 0   0  B_v] [A_q ; A_k ; A_v]     rank 3 r, the same function
    or       qkv    [B_q ; B_k ; B_v] A                                if all have one A: rank r, as an export writes it

The rules are those of an export of the base. The rows of B have the order of the fused weight's
rows, and so do the magnitudes of DoRA. A run has one rank: smaller factors are padded with zeros,
which add nothing and get no gradient.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.adapters.attach import A, B
from meshwright.adapters.magnitude import MAGNITUDE, row_lengths
from meshwright.checkpoint import (
    CheckpointMetadata,
    TensorKind,
    TensorPiece,
    begin,
    publish,
    write_shard,
)
from meshwright.checkpoint.files import final_directory
from meshwright.config import (
    RunConfig,
    load_saved,
    resolve,
    to_toml,
    write_snapshot,
)
from meshwright.errors import ModelError
from meshwright.model.build import configured_model
from meshwright.parameters import ParameterInfo
from meshwright.run.directory import check_own_directory
from meshwright.system.atomic import write_atomic
from meshwright_interop.huggingface.adapters import CONFIG, PREFIX, TENSORS
from meshwright_interop.huggingface.destination import check_output_directory, published_directory
from meshwright_interop.huggingface.files import DTYPES, read_json
from meshwright_interop.huggingface.peft_files import AdapterSettings, settings_of
from meshwright_interop.huggingface.rules import TensorMapping
from meshwright_interop.huggingface.source import open_source

Factors = Mapping[str, Mapping[str, Tensor]]
"""Module of transformers -> A (rank, I) and B (O, rank), and with DoRA ``magnitude_vector`` (O,).
An embedding (V, D) has A (rank, V) and B (D, rank).
"""
BATCH = {"batch": {"micro_batch_size": 1, "global_batch": 16}}
OPTIMIZER = {"learning_rate": 1e-4, "weight_decay": 0.0}


class ImportedAdapter(NamedTuple):
    """Imported adapters: the checkpoint of step 0, the run's configuration,
    the number of targets.
    """

    path: Path
    config: RunConfig
    num_targets: int


class Base(NamedTuple):
    """Frozen model that the adapters belong to."""

    layers: nn.Module
    """The model on meta."""
    rules: Sequence[TensorMapping]
    """Rules of its weights."""
    tree: Mapping[str, Any]
    """Sections of the run's configuration that follow from it."""
    read: Callable[[str], Tensor]
    """Function that returns a weight by its name."""
    names: Sequence[str] = ()
    """Weights that the run holds beside the adapters; empty: they stay in a directory."""
    num_bytes: int = 0
    write_files: Callable[[Path], object] = lambda run: None
    """Function that writes further files of the base into the run."""
    comment: str = ""


OpenedBase = Callable[[Mapping[str, Any], Path, Sequence[str]], AbstractContextManager[Base]]


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
    is_table: bool
    """True for an embedding, whose A is stored transposed."""

    def pieces(self, name: str, rank: int) -> Iterator[TensorPiece]:
        """Yield the factors of the same product with this rank, under the names of a module."""
        more = rank - len(self.down)
        down = nn.functional.pad(self.down, (0, 0, 0, more))
        up = nn.functional.pad(self.up, (0, more))
        for factor, value in ((A, down.t() if self.is_table else down), (B, up)):
            yield _piece(f"{name}.{factor}.weight", value)

    def magnitude_offsets(self, weight: Tensor) -> Tensor:
        """Return DoRA's magnitudes minus the row norms of the base's weight (O, I): (O,)."""
        rule, rows = self.rule._replace(transposed=False), len(weight)
        lengths = dict(rule.split(row_lengths(weight).unsqueeze(1)))

        def read(theirs: str) -> Tensor:
            if theirs not in self.magnitudes:
                return torch.zeros_like(lengths[theirs])
            return self.magnitudes[theirs].double().unsqueeze(1) - lengths[theirs]

        dtype = torch.promote_types(self.up.dtype, torch.float32)
        return rule.join(read, (rows, 1), torch.float64).squeeze(1).to(dtype)


def _piece(name: str, whole: Tensor) -> TensorPiece:
    info = ParameterInfo(name, tuple(whole.shape))
    return TensorPiece(TensorKind.WEIGHTS, info, whole.contiguous())


def import_adapters(
    source: Path, out: Path, opened_base: OpenedBase, overrides: Sequence[str] = ()
) -> ImportedAdapter:
    """Import the adapters in ``source`` as a run directory.

    Args:
        source: directory that peft has written.
        out: the run directory to write, new or empty.
        opened_base: context manager of the base, given the file's fields and directory and the
            overrides.
        overrides: configuration overrides, which go into its config.toml.

    Raises:
        ConfigError, ModelError, CheckpointError: the adapters are not supported, or do not fit the
        base. Nothing is written then.
    """
    out = check_output_directory(out)
    fields = read_json(source / CONFIG, "peft writes it beside an adapter")
    settings = settings_of(fields, source)
    with opened_base(fields, source, overrides) as base:
        fused = dict(fuse_factors(read_factors(source, settings), base, source))
        rank = max(len(adapter.down) for adapter in fused.values())
        config = _config(base.tree, settings, sorted(fused), rank, out, overrides)
        if not base.names:
            configured_model(config)  # raises what training with these adapters would

        def pieces() -> Iterator[TensorPiece]:
            for name in base.names:
                yield _piece(name, base.read(name))
            for name, adapter in fused.items():
                yield from adapter.pieces(name, rank)
                if settings.dora:
                    offsets = adapter.magnitude_offsets(base.read(f"{name}.weight"))
                    yield _piece(f"{name}.{MAGNITUDE}", offsets)

        num_bytes = sum(adapter.down.nbytes + adapter.up.nbytes for adapter in fused.values())
        with published_directory(out, base.num_bytes + num_bytes) as temporary:
            comment = f"Adapters of {source.name}{base.comment}"
            _write_run(temporary, config, pieces(), comment)
            base.write_files(temporary)
    return ImportedAdapter(final_directory(out, 0), resolve(config), len(fused))


# -- peft's file


def read_factors(source: Path, settings: AdapterSettings) -> Factors:
    """Return A and B, and with DoRA the magnitudes, of each module of transformers.

    Raises:
        ModelError: the file is missing, a factor has no partner, or they do not have the rank of
            the configuration.
    """
    place = source / TENSORS
    directory = open_source(source, single=TENSORS)
    if directory is None:
        raise ModelError("MW-INTEROP-112", f"{place} is missing: it holds the adapters' weights")
    factors: dict[str, dict[str, Tensor]] = {}
    for name in sorted(directory.tensors):
        dtype = directory.tensors[name].dtype
        if dtype not in DTYPES:
            raise ModelError(
                "MW-INTEROP-124",
                f"{place}: {name} is of {dtype}: only {', '.join(DTYPES)} are read",
            )
        module, _, kind = name.removeprefix(PREFIX).partition(".lora_")
        kind = kind.removesuffix(".weight").removeprefix("embedding_")
        factors.setdefault(module, {})[kind] = directory.read(name)
    for module, kinds in factors.items():
        dims = {kind: 2 if kind in ("A", "B") else 1 for kind in settings.kinds}
        fits = {kind: value.dim() for kind, value in kinds.items()} == dims
        if not fits or not len(kinds["A"]) == kinds["B"].shape[1] == settings.rank:
            raise ModelError(
                "MW-INTEROP-113",
                f"{place}: {module} does not have A and B of rank {settings.rank}: is it the file"
                f" that belongs to {CONFIG}?",
            )
    return factors


def fuse_factors(factors: Factors, base: Base, source: Path) -> Iterator[tuple[str, FusedAdapter]]:
    """Yield the name and the adapter of each module of ours.

    Raises:
        ModelError: a module of theirs is no linear or embedding of the base, or has other sizes.
    """
    left = dict(factors)
    for rule in base.rules:
        modules = [name.removesuffix(".weight") for name in rule.theirs]
        present = {name: left.pop(name) for name in modules if name in left}
        if not present:
            continue
        target = rule.ours.removesuffix(".weight")
        module = None if rule.place is not None else base.layers.get_submodule(target)
        if not isinstance(module, nn.Linear | nn.Embedding):
            raise ModelError(
                "MW-INTEROP-123",
                f"{source / TENSORS}: {min(present)} belongs to {rule.ours}; only linears and"
                " embeddings have adapters: merge it into the base with peft, or leave it out",
            )
        is_table = isinstance(module, nn.Embedding)
        shape = tuple(module.weight.shape)
        rows, columns = shape[::-1] if is_table else shape
        sizes = rule._replace(transposed=False).shapes((rows, 1))
        for name, kinds in present.items():
            num_rows = rows if is_table else sizes[f"{name}.weight"][0]
            num_magnitudes = columns if is_table else num_rows
            expected = {"A": columns, "B": num_rows, "magnitude_vector": num_magnitudes}
            found = {kind: value.shape[kind == "A"] for kind, value in kinds.items()}
            if found != {kind: expected[kind] for kind in kinds}:
                listed = ", ".join(f"{kind} {list(value.shape)}" for kind, value in kinds.items())
                raise ModelError(
                    "MW-INTEROP-114",
                    f"{source / TENSORS}: {listed} of {name} do not fit {rule.ours} {list(shape)}:"
                    " is it the model that they were trained on?",
                )
        down, up = _joined(rule, present, rows)
        magnitudes = {
            f"{name}.weight": kinds["magnitude_vector"]
            for name, kinds in present.items()
            if "magnitude_vector" in kinds
        }
        yield target, FusedAdapter(down, up, rule, magnitudes, is_table)
    if left:
        raise ModelError(
            "MW-INTEROP-115", f"{source / TENSORS}: {min(left)} belongs to no module of the base"
        )


def _joined(rule: TensorMapping, present: Factors, rows: int) -> tuple[Tensor, Tensor]:
    """Join the factors of transformers modules into A and B of our fused module,
    which has ``rows`` rows.
    """
    downs = [kinds["A"] for kinds in present.values()]
    width, is_one = len(downs[0]), all(torch.equal(down, downs[0]) for down in downs)
    if is_one:
        downs = downs[:1]
    columns = {name: 0 if is_one else index * width for index, name in enumerate(present)}
    dtypes = [kinds[kind].dtype for kinds in present.values() for kind in "AB"]
    dtype = functools.reduce(torch.promote_types, dtypes)
    straight, shape = rule._replace(transposed=False), (rows, len(downs) * width)
    shapes = straight.shapes(shape)

    def read(theirs: str) -> Tensor:
        name, whole = theirs.removesuffix(".weight"), torch.zeros(shapes[theirs], dtype=dtype)
        if name in present:
            whole[:, columns[name] : columns[name] + width] = present[name]["B"]
        return whole

    return torch.cat(downs).to(dtype), straight.join(read, shape, dtype)


# -- the run


def _config(
    of_base: Mapping[str, Any],
    settings: AdapterSettings,
    targets: list[str],
    rank: int,
    out: Path,
    overrides: Sequence[str],
) -> RunConfig:
    """Return the configuration of the run: that of the base, the adapters,
    and defaults for the rest.
    """
    adapter = {
        "rank": rank,
        "alpha": settings.factor * rank,
        "targets": targets,
        "dropout": settings.dropout,
        "dora": settings.dora,
    }
    tree = {
        "run": {"name": out.name, "directory": str(out.parent)},
        **of_base,
        **BATCH,
        "adapter": adapter,
        "optimizer": OPTIMIZER,
    }
    config = load_saved(tree, overrides, f"the run {out}")
    check_own_directory(config.run, out)
    return config


def _write_run(run: Path, config: RunConfig, pieces: Iterator[TensorPiece], comment: str) -> None:
    """Write a run directory: config.toml below ``comment``, its snapshot,
    ``pieces`` as the checkpoint of step 0.
    """
    resolved = resolve(config)
    shard = begin(run, 0, secrets.token_hex(4))
    write_shard(shard, "pp0-tp0", pieces, copied=True)
    state = {"tokens_seen": 0, "optimizer_steps": 0, "skipped_in_a_row": 0}
    head = CheckpointMetadata(0, 0, resolved.run.seed, resolved.model_dump(mode="json"), {}, state)
    publish(shard, final_directory(run, 0), head)
    write_snapshot(run, resolved)
    text = f"# {comment}: training starts from them.\n\n{to_toml(config)}"
    write_atomic(run / "config.toml", text)
