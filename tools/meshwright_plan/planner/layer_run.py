"""Run of one layer on the meta device, under an operation recorder: the source of its profile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.checkpoint import set_checkpoint_early_stop

from meshwright.errors import ModelError
from meshwright.mesh.fake import CountingGroup
from meshwright.pipeline.plan import SplitBackward, accumulate_deferred, recompute_parts, recomputed
from meshwright_plan.planner.context import ContextMeter
from meshwright_plan.planner.experts import count_shared, largest_parameter
from meshwright_plan.planner.kernels import ExecutionOptions, FusedCrossEntropy, KernelMode
from meshwright_plan.planner.layer_profile import (
    CoreCall,
    GroupMessages,
    LayerProfile,
    OutputTensor,
)
from meshwright_plan.planner.operations import WorkRecorder


class _ForwardRecord(NamedTuple):
    """Result of a recorded forward, without tensors, so that they are freed as in a run."""

    inputs: list[tuple[int, int]]
    """(storage number, bytes) of each input leaf."""
    outputs: list[tuple[int, int, bool]]
    """(storage number, bytes, needs gradient) of each output leaf."""
    specs: Any
    """Output with each tensor replaced by its spec."""
    peak: int
    num_ops: int
    messages: tuple[GroupMessages, ...]
    attended: tuple[tuple[int, int], ...]
    cores: tuple[CoreCall, ...]


class _BackwardRecord(NamedTuple):
    """Result of a recorded backward. The fields are those of :class:`LayerProfile`."""

    peak: int
    peak_from_outside: int
    num_ops: int
    messages: tuple[GroupMessages, ...]
    deferred_bytes: int = 0
    weight_peak: int = 0


class LayerRun:
    """Forward and backward of one layer under an operation recorder."""

    def __init__(
        self,
        name: str,
        layer: nn.Module,
        tp: CountingGroup,
        execution: ExecutionOptions,
        loss: Callable[[Any], Tensor] | None,
        recompute: Sequence[str],
        splits_backward: bool,
    ) -> None:
        """Prepare a run of ``layer``, which it may change.

        Args:
            loss: function of the layer's output; None if the layer is not the last.
            recompute: names of the parts that are recomputed in backward, below the layer; "" is
                the layer itself.
        """
        self.name, self.layer, self.tp, self.execution, self.loss = name, layer, tp, execution, loss
        self.meter: ContextMeter | None = None
        """Meter of the layer's attention cores."""
        self.split = SplitBackward() if splits_backward else None
        self.recorder = WorkRecorder(self.tp)
        self.kernels = KernelMode(self.recorder, self.execution)
        self.root: Tensor | None = None
        """Tensor whose backward starts the layer's; None if no output needs a gradient."""
        self.run: Any = layer
        if "" in recompute:
            self.run = partial(recomputed, layer, self._recompute_context)
        elif recompute:
            parts = [f"{name}{part}" for part in recompute]
            recompute_parts(name, layer, parts, self._recompute_context)

    @contextmanager
    def _recompute_context(self) -> Iterator[None]:
        """Enter the kernel and split-backward modes again for a recomputed layer:
        backward runs outside them.
        """
        with KernelMode(self.recorder, self.execution), self.split or nullcontext():
            yield

    def profile(self, value: Any) -> tuple[LayerProfile, Any]:
        """Run the layer on ``value``; return its profile,
        and its output as the next layer's input.
        """
        recorder, layer = self.recorder, self.layer
        for parameter in layer.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_free_gradient)  # type: ignore[no-untyped-call]
        self.tp.traffic.reset()
        if self.meter is not None:
            self.meter.take_calls()
        leaves, tree = tree_flatten(value)
        saves = saved_tensors_hooks(self.kernels.pack, self.kernels.unpack)
        hooks = saves if self.execution.saves_inputs else nullcontext()
        stop = set_checkpoint_early_stop(not self.execution.recomputes_whole)
        with self.kernels, recorder, self.split or nullcontext(), hooks, stop:
            forward = self._forward(leaves, tree)
            alive = recorder.alive()
            kept_bytes = recorder.live - sum(
                size for number, size in forward.inputs if number in alive
            )
            kept_bytes -= 0 if self.root is None else self.root.untyped_storage().nbytes()
            if self.execution.accumulates and self.loss is None:
                recorder.accumulated = self._accumulated(leaves)
            backward = self._backward(leaves)
        for leaf in leaves:
            leaf.grad = None
        index_of = {number: index for index, (number, _) in enumerate(forward.inputs)}
        work = partial(
            recorder.work, fused=self.execution.fused, any_order=self.execution.any_order
        )
        profile = LayerProfile(
            self.name,
            forward=work(0, forward.num_ops),
            backward=work(forward.num_ops, backward.num_ops),
            weight_half=work(backward.num_ops, len(recorder.ops)),
            forward_messages=forward.messages,
            backward_messages=backward.messages,
            num_parameters=sum(each.numel() for each in layer.parameters() if each.requires_grad),
            kept_bytes=kept_bytes,
            inputs_kept=tuple(number in alive for number, _ in forward.inputs),
            outputs=tuple(
                OutputTensor(s, index_of.get(n), n in alive, needs)
                for n, s, needs in forward.outputs
            ),
            forward_peak=forward.peak,
            backward_peak=backward.peak,
            backward_peak_from_outside=backward.peak_from_outside,
            deferred_bytes=backward.deferred_bytes,
            weight_peak=backward.weight_peak,
            attended=forward.attended,
            cores=forward.cores,
            num_experts=count_shared(layer),
            largest=largest_parameter(layer),
            num_frozen=sum(p.numel() for p in layer.parameters() if not p.requires_grad)
            - count_shared(layer, False),
            width=next((leaf.shape[-1] for leaf in leaves if leaf.is_floating_point()), 0),
        )
        return profile, tree_map(_like, forward.specs, is_leaf=lambda leaf: isinstance(leaf, _Spec))

    def _accumulated(self, leaves: list[Tensor]) -> tuple[set[tuple[int, ...]], set[int]]:
        """Return the shapes of weights, and the numbers of tokens, whose products accumulate into
        gradients.
        """
        weights = {tuple(p.shape) for p in self.layer.parameters() if p.dim() == 2}
        tokens = {leaf.shape[:-1].numel() for leaf in leaves}
        tokens |= {self.tp.size * number for number in tokens}
        return weights | {shape[::-1] for shape in weights}, tokens

    def _forward(self, leaves: list[Tensor], tree: Any) -> _ForwardRecord:
        recorder = self.recorder
        own_leaves = [_with_own_storage(leaf) for leaf in leaves]
        inputs = [
            (recorder.number_of(leaf), leaf.untyped_storage().nbytes()) for leaf in own_leaves
        ]
        base = recorder.live
        recorder.restart_peak()
        try:
            output = self.run(tree_unflatten(own_leaves, tree))
            end = output if self.loss is None else self._loss(output)
        except Exception as error:
            loss = ", or the loss of what it returns," if self.loss is not None else ""
            raise ModelError(
                "MW-PLANNER-006",
                f"layer {self.name} ({type(self.layer).__name__}){loss} cannot be run without"
                " values, on the meta device in the training dtype, to measure its memory:"
                f" {type(error).__name__}: {error}",
            ) from error
        peak, num_ops = recorder.peak - base, len(recorder.ops)
        results = [leaf for leaf in tree_leaves(end) if isinstance(leaf, Tensor)]
        roots = [leaf for leaf in results if leaf.requires_grad]
        self.root = _OutputGradients.apply(recorder, *roots) if roots else None  # type: ignore[no-untyped-call]
        return _ForwardRecord(
            inputs=inputs,
            outputs=[
                (recorder.number_of(x), x.untyped_storage().nbytes(), x.requires_grad)
                for x in results
            ],
            specs=tree_map(_spec_of, output),
            peak=peak,
            num_ops=num_ops,
            messages=self._messages(),
            attended=tuple(recorder.attended),
            cores=() if self.meter is None else self.meter.take_calls(),
        )

    def _backward(self, leaves: list[Tensor]) -> _BackwardRecord:
        recorder, before = self.recorder, self.recorder.live
        recorder.restart_peak()
        deferred: Any = None
        if self.root is not None:
            with nullcontext() if self.split is None else self.split.deferring() as deferred:
                self.root.backward()  # type: ignore[no-untyped-call]
        peak, peak_from_outside = recorder.peak - before, recorder.peak_unwatched - before
        record = _BackwardRecord(peak, peak_from_outside, len(recorder.ops), self._messages())
        if deferred is None:
            return record
        self.root = None
        deferred_bytes = recorder.live - sum(
            0 if x.grad is None else x.grad.untyped_storage().nbytes() for x in leaves
        )
        recorder.restart_peak()
        before = recorder.live
        accumulate_deferred(deferred)
        return record._replace(deferred_bytes=deferred_bytes, weight_peak=recorder.peak - before)

    def _loss(self, output: Any) -> Tensor:
        assert self.loss is not None
        if self.execution.loss_kernel and isinstance(output, Tensor):
            value: Tensor = FusedCrossEntropy.apply(output)  # type: ignore[no-untyped-call]
        else:
            value = self.loss(output)
        return value.sum()

    def _messages(self) -> tuple[GroupMessages, ...]:
        """Return the messages counted since the last call, and reset the counters."""
        counts = dict(self.tp.traffic.counts)
        self.tp.traffic.reset()
        return tuple(
            GroupMessages(operation, *counted, axis)
            for (axis, operation), counted in counts.items()
        )


class _OwnStorage(torch.autograd.Function):
    """Identity that gives an input leaf its own storage,
    to detect whether the layer saves it for backward.
    """

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return torch.empty_like(leaf)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _with_own_storage(leaf: Tensor) -> Tensor:
    return _OwnStorage.apply(leaf) if leaf.requires_grad else torch.empty_like(leaf)  # type: ignore[no-untyped-call]


class _OutputGradients(torch.autograd.Function):
    """Source of the output gradients: created in backward and watched by the recorder,
    with no other reference.
    """

    @staticmethod
    def forward(ctx: Any, recorder: WorkRecorder, *outputs: Tensor) -> Tensor:
        ctx.recorder = recorder
        ctx.specs = [(output.shape, output.dtype) for output in outputs]
        return torch.empty((), device="meta")

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in ctx.specs]
        for gradient in gradients:
            ctx.recorder.watch(gradient)
        return (None, *gradients)


class _Spec(NamedTuple):
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


def _spec_of(leaf: Any) -> Any:
    """Return the shape, stride, dtype and gradient flag of a tensor; any other value unchanged."""
    return (
        _Spec(leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad)
        if isinstance(leaf, Tensor)
        else leaf
    )


def _like(spec: Any) -> Any:
    """Create a new tensor from its spec, as the next layer's input."""
    if not isinstance(spec, _Spec):
        return spec
    fresh = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
    return fresh.requires_grad_(spec.requires_grad)


def _free_gradient(parameter: Tensor) -> None:
    """Free a gradient after accumulation: in a run it lies in a bucket,
    which was allocated before.
    """
    parameter.grad = None
