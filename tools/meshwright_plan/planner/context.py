"""Context parallelism in the planner: the hooks of a run on meta layers, key exchanges,
attention's load balance.

    ContextModel   the hooks of meshwright.context_parallel on a model, and a meter before each attention core
    ContextMeter   messages of the exchange of keys or heads; FLOPs of each core, as if every query saw every key
    KeyShares      share of these FLOPs that the busiest rank computes, from the documents of a corpus, or of one

Shapes: B samples, H query heads and G key-value heads of this rank, S tokens, d head_dim; cp ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from meshwright.config import Data, Parallel, RunConfig
from meshwright.config.combinations.features import Traits
from meshwright.config.combinations.refused import find_excluding
from meshwright.context_parallel import plan as context
from meshwright.context_parallel.balance import rank_loads
from meshwright.context_parallel.cut import HeadCut, TokenCut
from meshwright.context_parallel.order import BY_DOCUMENTS
from meshwright.data.sources import example, open_sources
from meshwright.errors import UserError
from meshwright.mesh.comm import tensor_bytes
from meshwright.mesh.fake import CountingGroup
from meshwright.model.build import PlainModel
from meshwright.pipeline.values import MetaMicrobatch
from meshwright.placement.patterns import entries_for
from meshwright_plan.planner.layer_profile import CoreCall, LayerProfile
from meshwright_plan.planner.operations import Work, WorkKind

AXIS = "cp"
MAX_SAMPLES = 16
"""Number of samples of the corpus whose document starts are read."""
LEAST_TOKENS = 8192
"""Smallest number of tokens per rank with which a search tries cp > 1, unless cp is pinned."""
EXCHANGE, ORDER = "keys", "zigzag"
"""Defaults of the exchange and of the order."""
LEAST_GAIN = 0.01
"""Share of the busiest rank's keys that an order by documents must save, to be chosen."""


def context_words(exchange: str, order: str) -> str:
    """Name an exchange and an order where they are not the defaults."""
    return ", ".join(
        value for value, default in ((exchange, EXCHANGE), (order, ORDER)) if value != default
    )


def degrees_to_try(
    data: Data, traits: Traits, divisors: Sequence[int], pinned: int | None
) -> list[int]:
    """Return the degrees of cp, among ``divisors`` of the ranks, that a search tries:
    only ``pinned``, if set.
    """
    if pinned is not None:
        return [cp for cp in divisors if cp == pinned]
    length = data.sequence_length
    if data.builder is not None or find_excluding("cp", traits) is not None:
        return [1]
    return [cp for cp in divisors if cp == 1 or (length % cp == 0 and length // cp >= LEAST_TOKENS)]


@dataclass
class ContextMeter:
    """Meter of the attention cores of one rank."""

    group: CountingGroup
    exchange: str = "keys"
    calls: list[CoreCall] = field(default_factory=list)

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextMeter:
        return self  # copies of a layer count together

    @property
    def key(self) -> tuple[int, str]:
        """Degree and exchange."""
        return self.group.size, self.exchange

    def take_calls(self) -> tuple[CoreCall, ...]:
        """Return the calls recorded since the previous ``take_calls``."""
        found = tuple(self.calls)
        self.calls.clear()
        return found

    def before(
        self, forward: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Record a call with q (B, H, S/cp, d), k and v (B, G, S/cp, d);
        count its exchange in forward and backward.

        A forward pre-hook. ``forward``: the core's forward, with the hooks of context parallelism.
        """
        (q, k, v, *others), cp = args, self.group.size
        pairs = float(q.shape[:-1].numel() * k.shape[-2] * cp)
        keys, out = (
            tensor_bytes(k) + tensor_bytes(v),
            q.shape[:-1].numel() * v.shape[-1] * q.element_size(),
        )
        groups = context.groups_of_call(forward, args, kwargs)
        window, flops = getattr(module, "window", None), 2.0 * pairs * (q.shape[-1] + v.shape[-1])
        self.calls.append(CoreCall(window, flops, groups))
        if cp > 1 and self.exchange == "heads":
            self._count("all_to_all", (tensor_bytes(q) + keys, out))
            k = _watched(k, partial(self._count, "all_to_all", (tensor_bytes(q) + keys, out)))
        elif cp > 1:
            of_group = (keys * cp // groups,) * groups
            self._count("all_gather", of_group)
            if groups > 1:
                k = _watched(k, partial(self._count, "all_gather", of_group))
            k = _watched(k, partial(self._count, "reduce_scatter", of_group))
        return (q, k, v, *others), kwargs

    def _count(self, operation: str, messages: Sequence[int]) -> None:
        """Count messages by bytes: of the whole tensor for a gather or reduction,
        of one rank for an all-to-all.
        """
        for num_bytes in messages:
            self.group.traffic.add(AXIS, operation, self.group.size, num_bytes)


def _watched(tensor: Tensor, called: Callable[[], None]) -> Tensor:
    """Return the tensor as an autograd node whose backward calls the function."""
    found: Tensor = _Watched.apply(tensor, called)  # type: ignore[no-untyped-call]
    return found


class _Watched(torch.autograd.Function):
    """Identity that calls a function in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, called: Callable[[], None]) -> Tensor:
        ctx.called = called
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.called()
        return gradient, None


class KeyShares:
    """Shares of the FLOPs of full attention that the busiest rank computes,
    for the documents of some samples.
    """

    def __init__(self, config: RunConfig) -> None:
        """Read the documents of the corpus, if there is one;
        otherwise each sample is one document.
        """
        found = _documents_of(config) if config.data.document_boundaries else []
        self.has_documents = bool(found)
        """True if the documents are those of a corpus."""
        self._samples = found or [np.zeros(config.data.sequence_length, dtype=np.bool_)]
        self._loads: dict[Any, list[NDArray[np.float64]]] = {}

    def order(self, cp: int) -> str:
        """Return the order to use over ``cp`` ranks:
        by documents if a corpus is known and it balances better.
        """
        if not self.has_documents or cp == 1:
            return ORDER
        usual, other = (
            sum(each.max() for each in self._of(cp, name)) for name in (ORDER, BY_DOCUMENTS)
        )
        return BY_DOCUMENTS if other < (1 - LEAST_GAIN) * usual else ORDER

    def _of(
        self, cp: int, order: str, window: int | None = None, heads: bool = False
    ) -> list[NDArray[np.float64]]:
        """Return the keys that each rank's queries see, (cp,), of each sample."""
        key = (cp, order, heads, window)
        if key not in self._loads:
            self._loads[key] = [
                rank_loads(order, cp, starts, window, heads=heads) for starts in self._samples
            ]
        return self._loads[key]

    def share(self, parallel: Parallel, micro_batch_size: int, window: int | None) -> float:
        """Return the share of full attention, S/cp queries x S keys,
        that the busiest rank computes, 0..1.

        A rank's load is summed over the samples of a micro-batch, because ranks synchronise only
        once per attention.
        """
        cp, size = parallel.cp, micro_batch_size
        loads = self._of(cp, parallel.cp_order, window, parallel.cp_exchange == "heads")
        together = (
            [loads[at : at + size] for at in range(0, len(loads), size)]
            if len(loads) > 1
            else [loads]
        )
        busiest = sum(float(np.sum(each, axis=0).max()) for each in together)
        return busiest / len(loads) / (len(self._samples[0]) ** 2 / cp)


def _documents_of(config: RunConfig) -> list[NDArray[np.bool_]]:
    """Return where documents begin in some samples of the training corpus, (S,) each;
    none without a corpus.
    """
    try:
        source, _ = open_sources(config)
        inputs, _ = source.read(list(range(MAX_SAMPLES)))
        return [starts.numpy() for starts in inputs["starts"]]
    except UserError:  # the corpus is elsewhere, or not yet there
        return []


class ContextModel:
    """Context parallelism of one model: its layers with the hooks of a run,
    and their attention's share of FLOPs.
    """

    def __init__(self, config: RunConfig, model: PlainModel) -> None:
        self.config, self.model = config, model
        self._cuts: dict[int, TokenCut] = {}
        self._layers: dict[tuple[int, str], nn.Sequential] = {}
        self._heads: set[tuple[int, int]] = set()

    @cached_property
    def shares(self) -> KeyShares:
        """Shares of attention's FLOPs, by the documents of the training corpus."""
        return KeyShares(self.config)

    def contexts(self, cp: int, tp: int, order: object = None) -> list[dict[str, Any]]:
        """Return the exchanges, each with ``order`` or its best one, that a search tries.
        Call :meth:`layers` for ``cp`` before.

        Heads can be exchanged if cp x tp divides the numbers of query and key heads of every
        attention.
        """
        if cp == 1:
            return [{}]
        divides = self._heads and all(
            each % (cp * tp) == 0 for pair in self._heads for each in pair
        )
        keys = {"exchange": EXCHANGE, "order": order or self.shares.order(cp)}
        return [keys, *([{"exchange": "heads", "order": order or ORDER}] if divides else [])]

    def _noting_heads(self) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        """Return a hook that records (H, G) of calls with q (B, H, S, d), k (B, G, S, d),
        also by copies of a core.
        """
        heads = self._heads
        return lambda module, args: heads.add((args[0].shape[1], args[1].shape[1]))

    def _cores(self, layers: nn.Module) -> list[nn.Module]:
        """Return the attention cores that the sharding plan names."""
        return [
            each
            for name, each in layers.named_modules()
            if context.CORE in map(str, entries_for(name, self.model.plan))
        ]

    def layers(self, cp: int, parts: int, exchange: str = EXCHANGE) -> nn.Sequential:
        """Return the layers as ``cp`` ranks run them, for any order. ``parts``: number of parts
        into which sequence parallelism cuts a rank's tokens.

        Raises:
            ModelError: the model does not support it, for the reason that a launch would give.
        """
        if cp == 1:
            return self.model.layers
        builder, parallel = self.config.model.builder, self.config.parallel
        if (cp, exchange) not in self._layers:
            shapes = MetaMicrobatch(*example(self.config.data, 1))
            group = CountingGroup(AXIS, tuple(range(cp)), 0)
            cut = TokenCut(group, parallel.cp_order, shapes.labels)
            for positions in (cut.positions, cut.from_ranks):
                # cached here, so that no layer's profile includes it
                positions(shapes.labels.device)
            cut.check(builder, *shapes, parts=1, heads=len(self.model.loss_heads))
            layers = copy.deepcopy(self.model.layers)
            noted = [
                core.register_forward_pre_hook(self._noting_heads(), prepend=True)
                for core in self._cores(layers)
                if exchange == EXCHANGE
            ]
            heads = HeadCut(group) if exchange == "heads" else parallel.cp_head_groups
            context.apply(builder, layers, self.model.plan, shapes.inputs, cut, heads)
            for each in noted:
                each.remove()
            self._cuts[cp], self._layers[cp, exchange] = cut, layers
        self._cuts[cp].check(builder, *example(self.config.data, 1), parts=parts, heads=0)
        return self._layers[cp, exchange]

    def labels(self, cp: int, labels: Tensor) -> Tensor:
        """Return a rank's labels: (B, S) -> (B, S/cp)."""
        return labels if cp == 1 else self._cuts[cp].take_labels(labels)

    def install_meter(
        self, layers: nn.Module, tp: CountingGroup, cp: int, exchange: str = EXCHANGE
    ) -> ContextMeter | None:
        """Install a meter before each attention core that the sharding plan names,
        and before the hooks of a run.

        ``tp``: the group of the layers, whose traffic counts the exchange too. None: there is
            nothing to measure.
        """
        if cp == 1 and not self.shares.has_documents:
            return None
        group = CountingGroup(AXIS, tuple(range(cp)), 0, traffic=tp.traffic)
        meter = ContextMeter(group, exchange)
        for core in self._cores(layers):
            core.register_forward_pre_hook(
                partial(meter.before, core.forward), prepend=True, with_kwargs=True
            )
        return meter

    def with_shares(
        self, layers: tuple[LayerProfile, ...], parallel: Parallel, micro_batch_size: int
    ) -> tuple[LayerProfile, ...]:
        """Return profiles in which the FLOPs of metered attention are those of the busiest rank."""
        changed: dict[int, LayerProfile] = {}
        for layer in layers:
            counted = sum(
                work.flops * work.times for work in layer.forward if work.kind is WorkKind.ATTENTION
            )
            if id(layer.forward) not in changed and counted and layer.cores:
                wanted = sum(
                    call.flops * self.shares.share(parallel, micro_batch_size, call.window)
                    for call in layer.cores
                )
                changed[id(layer.forward)] = scale_attention(layer, wanted / counted)
        if not changed:
            return layers
        return tuple(
            replace(changed.get(id(layer.forward), layer), name=layer.name) for layer in layers
        )


def scale_attention(layer: LayerProfile, factor: float) -> LayerProfile:
    """Return a profile whose attention has ``factor`` times the FLOPs."""

    def scale(works: Sequence[Work]) -> tuple[Work, ...]:
        return tuple(
            w._replace(flops=w.flops * factor) if w.kind is WorkKind.ATTENTION else w for w in works
        )

    weight_half = scale(layer.weight_half)
    return replace(
        layer, forward=scale(layer.forward), backward=scale(layer.backward), weight_half=weight_half
    )
