"""Traits of a model and its samples that decide which layouts can be verified, and against which reference."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.config import RunConfig
from meshwright.context_parallel.cut import STARTS
from meshwright.context_parallel.plan import CORE
from meshwright.data.sources import Source, example
from meshwright.expert_parallel.plan import expert_names
from meshwright.model.buffers import couples_samples, has_statistics, has_step_sums, owner_of, running_buffers
from meshwright.model.build import PlainModel, configured_model
from meshwright.pipeline.values import MetaMicrobatch
from meshwright.seeding import SeededDropout
from meshwright.verify.probe import find_coupling


class Traits(NamedTuple):
    """Traits of a model, found on the meta device."""

    num_layers: int
    num_parameters: int
    """Number of trained parameters; tied ones count once."""
    is_sharded: bool
    """True if the model has a sharding plan, so tp is possible."""
    is_sequence: bool
    """True if each sample has a row of labels, and the model rules out neither tp nor sequence parallelism."""
    couples_samples: bool
    """True if samples of a micro-batch depend on each other; the micro-batch size is then part of the model."""
    has_running: bool
    """True if forward changes buffers other than BatchNorm statistics and step sums: only one replica is possible."""
    impossible: tuple[str, ...] = ()
    """Features that the model declares impossible, each with the reason."""
    is_tied: bool = False
    """True if two layers share a weight."""
    has_dropout: bool = False
    """True if any dropout has p > 0."""
    has_selective: bool = False
    """True if the model names parts for selective recompute (activation checkpointing)."""
    coupling: str = ""
    """Layer in which samples depend on each other, if running the model revealed it; else ""."""
    vocab_sizes: tuple[int, ...] = ()
    """Row counts of the weights that are sharded as a vocabulary; tp pads them."""
    has_core: bool = False
    """True if the plan names an attention core and the rest of the model allows context parallelism."""
    has_rows: bool = False
    """True if each sample has a row of labels, which context parallelism needs."""
    has_documents: bool = False
    """True if the samples have document starts, so that their tokens can be dealt by documents."""
    needs_full_weights: bool = False
    """True if the optimizer steps whole parameters (Muon, Adafactor), which excludes offload."""
    has_statistics: bool = False
    """True if BatchNorm keeps running statistics, which excludes tp and cp."""
    eps: tuple[int, ...] = (1,)
    """Degrees of expert parallelism to test: those of 1, 2 and 4 that divide the experts of every layer."""

    experts: tuple[int, ...] = ()
    """Numbers of experts of the model's layers."""

    @property
    def of_coupling(self) -> str:
        """The coupling layer in parentheses with a leading space, or ""."""
        return f" ({self.coupling})" if self.coupling else ""

    def left_out(self) -> list[str]:
        """Return reasons why some of the default layouts are missing, one sentence each."""
        reasons = list(self.impossible)
        if self.has_running:
            reasons.append("dp, tp and recompute: forward changes buffers, which needs one replica that runs it once")
        elif self.has_statistics:
            reasons.append("tp and cp: BatchNorm takes the statistics of whole micro-batches")
        elif not self.is_sharded and not self.impossible:
            reasons.append("tp: the model has no sharding_plan")
        if (
            self.is_sharded
            and not self.is_sequence
            and not self.impossible
            and not self.has_running | self.has_statistics
        ):
            reasons.append("sequence parallelism: a sample has one label, not a sequence of them")
        is_cp_declared = any(reason.startswith("cp: ") for reason in self.impossible)
        if self.is_sharded and self.has_rows and not self.has_core | self.has_running | is_cp_declared:
            reasons.append(f'context parallelism: no attention core ("{CORE}") in the plan, or multi-token prediction')
        elif self.has_rows and self.has_core and not self.has_documents and not self.has_running:
            reasons.append("cp in the order by documents: the samples have no document starts")
        if self.needs_full_weights:
            reasons.append("offload: the optimizer steps whole parameters, on the device")
        if self.couples_samples:
            why = f"the samples of a micro-batch depend on each other{self.of_coupling}"
            reasons.append(f"other micro-batch sizes: {why}")
        return reasons


def vocab_sizes(model: PlainModel) -> tuple[int, ...]:
    """Return the row count of each weight that the sharding plan cuts as a vocabulary."""
    sizes = set()
    for name, module in model.layers.named_modules():
        kinds = {kind for pattern, kind in model.plan.items() if fnmatchcase(name, pattern)}
        if "vocab" in kinds and isinstance(getattr(module, "weight", None), Tensor):
            sizes.add(int(module.weight.shape[0]))
    return tuple(sorted(sizes))


def _experts(model: PlainModel) -> tuple[int, ...]:
    """Return :attr:`Traits.experts`."""
    names = expert_names(model.layers, model.plan)
    return tuple(sorted({whole.shape[0] for name in names for whole in model.layers.get_submodule(name).parameters()}))


def _eps(config: RunConfig, experts: tuple[int, ...]) -> tuple[int, ...]:
    """Return :attr:`Traits.eps`: only 1 without experts, or with Adafactor, which steps whole experts."""
    if not experts or config.optimizer.name == "adafactor":
        return (1,)
    return tuple(ep for ep in (1, 2, 4) if all(count % ep == 0 for count in experts))


def probe_coupling(traits: Traits, config: RunConfig, source: Source) -> Traits:
    """Run the model in plain torch, and return the traits with the layer in which samples depend on each other.

    Raises:
        ModelError: a layer returns different numbers for the same samples.
    """
    coupling = find_coupling(config, source)
    return traits._replace(coupling=coupling, couples_samples=traits.couples_samples or bool(coupling))


def traits_of(config: RunConfig) -> Traits:
    """Build the model on meta and return its traits.

    Raises:
        UserError: the model or the samples cannot be built.
    """
    model = configured_model(config)
    shapes = MetaMicrobatch(*example(config, 2)).cast(torch.float32)
    trained = {model.canonical(n): p.numel() for n, p in model.layers.named_parameters() if p.requires_grad}
    try:
        running = running_buffers(model.layers, shapes.inputs)
    except Exception:  # the layouts' blueprints raise the error for it
        running = []
    experts = _experts(model)
    owners = [owner for name in running if not has_step_sums(owner := owner_of(model.layers, name))]
    return Traits(
        num_layers=len(model.layers),
        num_parameters=sum(trained.values()),
        is_sharded=bool(model.plan) and "tp" not in model.impossible,
        is_sequence=shapes.labels.dim() > 1 and not model.impossible.keys() & {"tp", "sequence"},
        impossible=tuple(f"{name}: {why}" for name, why in model.impossible.items()),
        couples_samples=couples_samples(model.layers, running),
        has_running=not all(map(has_statistics, owners)),
        has_statistics=any(map(has_statistics, owners)),
        is_tied=any(len({name.partition(".")[0] for name in names}) > 1 for names in model.tied),
        has_dropout=any(isinstance(module, SeededDropout) and module.p > 0 for module in model.layers.modules()),
        has_selective=bool(model.selective_recompute),
        vocab_sizes=vocab_sizes(model),
        has_documents=isinstance(shapes.inputs, dict) and STARTS in shapes.inputs,
        has_core=CORE in map(str, model.plan.values()) and not model.loss_heads and "cp" not in model.impossible,
        has_rows=shapes.labels.dim() > 1,
        needs_full_weights=config.optimizer.needs_full_weights,
        eps=_eps(config, experts),
        experts=experts,
    )
