"""Adapters of a checkpoint, saved under any layout: exported for peft, or merged into the weights.

    peft     adapter_model.safetensors, adapter_config.json: for ``peft.PeftModel.from_pretrained(model, PATH)``
    merged   a directory as :mod:`export` writes it, with W + (alpha / rank) B A in place of W

The adapter of a fused linear (qkv, gate_up) becomes one for each of its transformers modules: with
the same A, and the rows of B split by the rule of W. DoRA: peft stores the magnitudes, a checkpoint
their differences from W's row norms.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from meshwright.adapters.attach import factor_of, is_adapter
from meshwright.adapters.fingerprint import FINGERPRINT, base_sum, check_base
from meshwright.adapters.magnitude import MAGNITUDE, merged, row_lengths
from meshwright.checkpoint import CheckpointReader, TensorKind
from meshwright.checkpoint.manifest import MANIFEST, Manifest, TensorEntry
from meshwright.config import RunConfig, leaves_out_base, parse
from meshwright.config.sections import Adapter
from meshwright.errors import CheckpointError, ModelError
from meshwright.model.build import PlainModel, configured_model
from meshwright.parameters import DTYPES, ParameterInfo
from meshwright.system.store import Place
from meshwright_interop.huggingface.destination import check_output_directory, published_directory
from meshwright_interop.huggingface.export import (
    ExportPlan,
    ExportResult,
    local_place,
    open_verified,
)
from meshwright_interop.huggingface.files import write_json
from meshwright_interop.huggingface.rules import TensorMapping
from meshwright_interop.huggingface.writing import DTYPE_NAMES, narrowed, parse_dtype

TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
"""Prefix of every name in peft's file."""
PlanExport = Callable[[RunConfig, Path], ExportPlan]


def targets_of(checkpoint: CheckpointReader) -> list[str]:
    """Return the names of the modules with an adapter, sorted.

    Raises:
        CheckpointError: the checkpoint has none.
    """
    names = checkpoint.parameters(TensorKind.WEIGHTS)
    found = [
        name.removesuffix(".lora_a.weight") for name in names if name.endswith(".lora_a.weight")
    ]
    if not found:
        raise CheckpointError(
            "MW-INTEROP-100",
            f"{checkpoint.path} has no adapters: its run had no adapter.rank. Export with --to hf",
        )
    return found


def model_of(config: RunConfig) -> PlainModel:
    """Build the model of a saved configuration, whose builder a plan of its export has accepted.

    Its parameter groups and attention function are left out: code that a checkpoint names must not
    run.
    """
    return configured_model(config.replace(model={"parameter_groups": [], "attention": None}))


def read_factor(checkpoint: CheckpointReader, name: str) -> Tensor:
    """Read A or B of an adapter: the master weights if the checkpoint has them,
    else the weights.
    """
    kind = (
        TensorKind.MASTER
        if name in checkpoint.parameters(TensorKind.MASTER)
        else TensorKind.WEIGHTS
    )
    found = checkpoint.read(kind, ParameterInfo(name, checkpoint.shape(kind, name)))
    assert found is not None, name
    return found


def export_adapter(
    plan_export: PlanExport, source: Place, out: Path, *, dtype: str | None = None
) -> ExportResult:
    """Export the adapters of a checkpoint as a directory that peft loads.

    Args:
        plan_export: function that plans the export of the whole model; its rules are those of the
            targets' weights.
        source: a checkpoint, or a run directory, whose newest valid checkpoint is used.
        out: the directory to write, new or empty.
        dtype: element type of all tensors; None keeps the saved ones, or those of the master
            weights.

    Raises:
        CheckpointError, ModelError: the checkpoint is damaged or has no adapters, or a target has
            no name there.
    """
    chosen, out = parse_dtype(dtype), check_output_directory(out)
    with open_verified(source) as checkpoint:
        targets = targets_of(checkpoint)
        config = parse(json.dumps(checkpoint.manifest.config), f"{checkpoint.path}/{MANIFEST}")
        plan = plan_export(config, local_place(checkpoint.path, config))
        rules = {rule.ours: rule for rule in plan.rules}
        model = model_of(config)
        base = BaseWeights(checkpoint, config, model) if config.adapter.dora else None
        tensors: dict[str, Tensor] = {}
        for target in targets:
            is_table = isinstance(model.layers.get_submodule(target), nn.Embedding)
            down, up = (read_factor(checkpoint, f"{target}.lora_{each}.weight") for each in "ab")
            tensors |= dict(_theirs(target, rules, down, up, is_table))
            if base is not None:
                added = read_factor(checkpoint, f"{target}.{MAGNITUDE}")
                weight = f"{target}.weight"
                shape = tuple(model.layers.get_parameter(weight).shape)
                lengths = row_lengths(base.read(ParameterInfo(weight, shape))) + added.double()
                tensors |= dict(_magnitudes(rules[weight], lengths.to(added.dtype)))
    tensors = {
        name: narrowed(each, chosen or each.dtype, name).contiguous()
        for name, each in tensors.items()
    }
    with published_directory(out, sum(tensor.nbytes for tensor in tensors.values())) as temporary:
        save_file(tensors, temporary / TENSORS, {"format": "pt"})
        write_json(
            temporary / CONFIG, _config(config.adapter, config.model.builder, plan, sorted(tensors))
        )
        files = {TENSORS: (temporary / TENSORS).stat().st_size}
    dtypes = sorted({DTYPE_NAMES[tensor.dtype] for tensor in tensors.values()})
    return ExportResult(out, plan.model, "", len(tensors), dtypes, files, [CONFIG], [])


def _theirs(
    target: str, rules: Mapping[str, TensorMapping], down: Tensor, up: Tensor, is_table: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and values of each tensor in peft's file: A (rank, I), B (O, rank).

    ``down``, ``up``: A and B of ours; of an embedding (V, D) they are (V, rank), which is
        transposed, and (D, rank).

    Raises:
        ModelError: the target's weight has no name in transformers.
    """
    rule = rules.get(f"{target}.weight")
    if rule is None:
        raise ModelError(
            "MW-INTEROP-101",
            f"{target} has an adapter, and no counterpart in transformers: merge it, or train"
            " without",
        )
    if is_table:
        name = PREFIX + rule.theirs[0].removesuffix(".weight")
        yield f"{name}.lora_embedding_A", down.t()
        yield f"{name}.lora_embedding_B", up * rule.factors[0] if rule.factors else up
        return
    for theirs, part in rule._replace(transposed=False).split(up):
        name = PREFIX + theirs.removesuffix(".weight")
        yield f"{name}.lora_A.weight", down.clone()
        yield f"{name}.lora_B.weight", part


def _magnitudes(rule: TensorMapping, lengths: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and values of each vector of magnitudes in peft's file."""
    for theirs, part in rule._replace(transposed=False).split(lengths.unsqueeze(1)):
        yield (
            f"{PREFIX}{theirs.removesuffix('.weight')}.lora_magnitude_vector",
            part.squeeze(1).clone(),
        )


def _config(adapter: Adapter, builder: str, plan: ExportPlan, names: list[str]) -> dict[str, Any]:
    """Return peft's adapter_config.json. Targets are whole names,
    so that no other module has one of their endings.
    """
    modules = sorted({name.removeprefix(PREFIX).partition(".lora_")[0] for name in names})
    transposed = {
        theirs.removesuffix(".weight")
        for rule in plan.rules
        if rule.transposed
        for theirs in rule.theirs
    }
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if plan.loader == "AutoModelForCausalLM" else "SEQ_2_SEQ_LM",
        "base_model_name_or_path": (
            builder.removeprefix("hf:") if builder.startswith("hf:") else None
        ),
        "r": adapter.rank,
        "lora_alpha": adapter.alpha or adapter.rank,
        "lora_dropout": adapter.dropout,
        "target_modules": modules,
        "bias": "none",
        "use_dora": adapter.dora,
        "fan_in_fan_out": not transposed.isdisjoint(modules),
        "inference_mode": True,
    }


def base_parameters(model: PlainModel) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters beside adapters, each tied weight once, by canonical name."""
    for name, parameter in model.layers.named_parameters(remove_duplicate=False):
        if not is_adapter(name) and model.canonical(name) == name:
            yield name, parameter


class BaseWeights:
    """Frozen base weights of a checkpoint with adapters: read from it,
    or from the model's directory if it omits them.

    Weights from a directory are compared with the checkpoint's fingerprint first.
    """

    def __init__(self, checkpoint: CheckpointReader, config: RunConfig, model: PlainModel) -> None:
        self._checkpoint, self._model = checkpoint, model
        if leaves_out_base(config.adapter, config.model, config.run):
            saved, dtype = checkpoint.manifest.state.get(FINGERPRINT), DTYPES[config.train.dtype]
            check_base(saved, self._sum(dtype), str(checkpoint.path), config.model.builder)

    def _sum(self, dtype: torch.dtype) -> Tensor:
        """Return the fingerprint sum of the directory's weights in the training dtype.
        Reads them one at a time.
        """
        infos = [ParameterInfo(name, tuple(p.shape)) for name, p in base_parameters(self._model)]
        return base_sum((info, self._model.initial(info.name).to(dtype)) for info in infos)

    def read(self, info: ParameterInfo) -> Tensor:
        """Read a weight, or the slice of it that ``info`` names, such as one expert."""
        if TensorKind.WEIGHTS.of(info.name) not in self._checkpoint.manifest.tensors:
            return info.take(self._model.initial(info.name))
        found = self._checkpoint.read(TensorKind.WEIGHTS, info)
        assert found is not None, info.name
        return found


class MergedWeights:
    """Weights of a checkpoint with the adapters merged, read as from a checkpoint without adapters.

    W + (alpha / rank) B A, with DoRA scaled by row, is computed in float64, so that the export
    rounds it once, to the dtype that it writes.
    """

    def __init__(self, checkpoint: CheckpointReader, config: RunConfig) -> None:
        self.checkpoint, self.path = checkpoint, checkpoint.path
        self._targets = set(targets_of(checkpoint))
        self._factor, self._is_dora = factor_of(config.adapter), config.adapter.dora
        self._model = model_of(config)
        entries = checkpoint.manifest.tensors
        any_adapter = entries[TensorKind.WEIGHTS.of(f"{min(self._targets)}.lora_a.weight")]
        tensors: dict[str, TensorEntry] = {}
        for name, parameter in base_parameters(self._model):
            key = TensorKind.WEIGHTS.of(name)
            tensors[key] = entries.get(
                key, any_adapter.model_copy(update={"shape": tuple(parameter.shape)})
            )
        for name, _ in self._model.layers.named_buffers():  # such as the bias of a router
            if (key := TensorKind.WEIGHTS.of(name)) in entries:
                tensors[key] = entries[key]
        self._base = BaseWeights(checkpoint, config, self._model)
        self.manifest: Manifest = checkpoint.manifest.model_copy(update={"tensors": tensors})

    def parameters(self, kind: TensorKind) -> list[str]:
        """Return the names of the merged weights; of any other kind there are none."""
        prefix = kind.of("")
        return sorted(
            name.removeprefix(prefix) for name in self.manifest.tensors if name.startswith(prefix)
        )

    def shape(self, kind: TensorKind, parameter: str) -> tuple[int, ...]:
        """Return the global shape of a weight."""
        return self.manifest.tensors[kind.of(parameter)].shape

    def read(self, kind: TensorKind, info: ParameterInfo) -> Tensor:
        """Read a weight, of the checkpoint or of the model's directory;
        a whole one with its adapter, if it has one.
        """
        weight = self._base.read(info)
        target = info.name.removesuffix(".weight")
        if target not in self._targets or target == info.name:
            return weight
        down, up = (
            read_factor(self.checkpoint, f"{target}.lora_{each}.weight").double() for each in "ab"
        )
        is_table = isinstance(self._model.layers.get_submodule(target), nn.Embedding)
        product = self._factor * (down @ up.t() if is_table else up @ down)
        if not self._is_dora:
            return weight.double() + product
        return merged(
            weight.double(), product, read_factor(self.checkpoint, f"{target}.{MAGNITUDE}").double()
        )

    def close(self) -> None:
        """Release the files."""
        self.checkpoint.close()
