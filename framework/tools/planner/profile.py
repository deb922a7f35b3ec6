"""Profiles of layers for one micro-batch on one tp rank, measured by running the real modules on the meta device.

    plain model on meta -> split over tp -> one layer after the other, forward and backward, on a Tape

    LayerProfile   work      operations of forward and backward, to be timed on a device
                   messages  collectives of its tp group
                   memory    bytes kept for backward, and peaks in forward and in backward

There are no formulas per model. Equal layers with equal inputs are run once.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.checkpoint import set_checkpoint_early_stop

from meshwright.errors import ModelError
from meshwright.mesh.comm import Counted
from meshwright.mesh.fake import CountingGroup
from meshwright.pipeline.outline import outline_of, outline_of_value
from meshwright.pipeline.recompute import recompute_parts, recomputed
from meshwright.pipeline.split_backward import SplitBackward, accumulate_deferred
from meshwright.pipeline.values import Loss
from meshwright.seeding import Draw, SeededDropout
from meshwright.tools.planner.operations import AttentionKernel, LossKernel, Tape, Work
from meshwright.tools.planner.operations import ExecutionOptions as Practice


class GroupMessages(NamedTuple):
    """Messages of one kind within a tp group."""

    operation: str
    calls: int
    wire_bytes: float
    """Bytes that one rank puts on the wire, all calls together."""


class Leaf(NamedTuple):
    """A tensor in the output of a layer."""

    bytes: int
    comes_from: int | None
    """Index of the input leaf whose storage this tensor shares; None if the layer created it."""
    kept: bool
    """True if the layer itself keeps the tensor for its backward."""
    needs_gradient: bool


@dataclass(frozen=True)
class LayerProfile:
    """Profile of a layer for one micro-batch on one tp rank; the last includes the loss. Bytes are of live tensors."""

    name: str
    forward: tuple[Work, ...]
    backward: tuple[Work, ...]
    weight_half: tuple[Work, ...]
    """Weight-gradient half of a split backward; ``backward`` is then the input-gradient half."""
    forward_says: tuple[GroupMessages, ...]
    backward_says: tuple[GroupMessages, ...]
    num_parameters: int
    """Number of local parameter elements; a weight tied to another layer's counts in both."""
    kept_bytes: int
    """Bytes kept between forward and backward, without inputs; includes the output if the layer keeps it."""
    inputs_kept: tuple[bool, ...]
    """True for each input leaf that the layer keeps for backward."""
    outputs: tuple[Leaf, ...]
    forward_peak: int
    """Peak bytes in forward, above the bytes live before it, without inputs."""
    backward_peak: int
    """Peak bytes in backward, above the bytes live before it, including those kept (which are freed gradually)."""
    backward_peak_from_outside: int
    """The same peak if the incoming gradient is held and counted elsewhere."""
    noted_bytes: int = 0
    """Bytes kept between the halves of a split backward."""
    weight_peak: int = 0
    """Peak bytes in the second half of a split backward, above the bytes live before it and those kept."""
    attended: tuple[tuple[int, int], ...] = ()
    """(bytes of queries, bytes of keys and values) of each attention in forward."""

    @property
    def output_bytes(self) -> int:
        """Bytes of the output tensors."""
        return sum(leaf.bytes for leaf in self.outputs)


def profile_layers(
    layers: Sequence[tuple[str, nn.Module]],
    inputs: Any,
    labels: Tensor | None,
    *,
    tp: CountingGroup,
    loss: Loss,
    practice: Practice,
    recompute: Sequence[str] = (),
    splits_backward: bool = False,
    seen: dict[Any, tuple[LayerProfile, Any]] | None = None,
) -> tuple[LayerProfile, ...]:
    """Profile every layer, first to last.

    Args:
        layers: (name, module), split over ``tp`` already, in the training dtype, on meta. A module that represents
            several layers is repeated.
        inputs: of one micro-batch, on meta; full tensors, as every tp rank gets them.
        labels: of that micro-batch; None leaves the loss out.
        recompute: names of the layers and modules that are recomputed in backward (activation checkpointing).
        seen: cache shared by calls for the same model and loss.

    Raises:
        ModelError: a layer, or the loss, fails on meta.
    """
    value = inputs
    draw = Draw(torch.empty(len(tree_leaves(value)[0]), dtype=torch.int64, device="meta"), is_recompute=True)
    found = []
    seen = {} if seen is None else seen
    outlines: dict[int, Any] = {}
    for index, (name, original) in enumerate(layers):
        if id(original) not in outlines:
            outlines[id(original)] = outline_of(original)
        ending = (loss, labels) if labels is not None and index == len(layers) - 1 else None
        parts = tuple(part.removeprefix(name) for part in recompute if part.split(".")[0] == name)
        key: Any = (
            outlines[id(original)],
            outline_of_value(value),
            ending and outline_of_value(labels),
            parts,
            practice,
            tp.size,
        )
        key = (*key, splits_backward)
        if key not in seen:
            seen[key] = _profile(name, _ready(original, draw), value, tp, ending, practice, parts, splits_backward)
        profile, value = seen[key]
        found.append(profile if profile.name == name else _renamed(profile, name))
    return tuple(found)


def _renamed(profile: LayerProfile, name: str) -> LayerProfile:
    return LayerProfile(**{**vars(profile), "name": name})


def _ready(original: nn.Module, draw: Draw) -> nn.Module:
    """Return a copy of a layer on meta in train mode, whose dropouts draw for samples without values."""
    layer = copy.deepcopy(original).to("meta").train()
    for module in layer.modules():
        if isinstance(module, SeededDropout):
            module.draw, module.name = draw, ""
    return layer


class _Given(torch.autograd.Function):
    """Identity that gives an input leaf its own storage, so that the tape sees if the layer keeps it."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return torch.empty_like(leaf)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _given(leaf: Tensor) -> Tensor:
    return _Given.apply(leaf) if leaf.requires_grad else torch.empty_like(leaf)  # type: ignore[no-untyped-call]


class _Begin(torch.autograd.Function):
    """Source of the output gradients: created in backward and watched by the tape, with no other reference."""

    @staticmethod
    def forward(ctx: Any, tape: Tape, *outputs: Tensor) -> Tensor:
        ctx.tape = tape
        ctx.specs = [(output.shape, output.dtype) for output in outputs]
        return torch.empty((), device="meta")

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in ctx.specs]
        for gradient in gradients:
            ctx.tape.watch(gradient)
        return (None, *gradients)


@contextmanager
def _again(kernel: AttentionKernel, split: SplitBackward | None) -> Iterator[None]:
    """Enter the attention and split-backward modes again for a recomputed layer, because backward runs outside them."""
    with AttentionKernel(kernel.tape, kernel.practice), split or nullcontext():
        yield


@contextmanager
def _as_it_is_run(kernel: AttentionKernel) -> Iterator[None]:
    """Apply the practice's choices for saved tensors and for the extent of recompute."""
    practice = kernel.practice
    hooks = saved_tensors_hooks(kernel.pack, kernel.unpack) if practice.saves_inputs else nullcontext()
    with hooks, set_checkpoint_early_stop(not practice.recomputes_whole):
        yield


def _loss(ending: tuple[Loss, Tensor], output: Any, practice: Practice) -> Tensor:
    if practice.loss_kernel and isinstance(output, Tensor):
        value: Tensor = LossKernel.apply(output)  # type: ignore[no-untyped-call]
    else:
        value = ending[0](output, ending[1].to("meta"))
    return value.sum()


def _profile(
    name: str,
    layer: nn.Module,
    value: Any,
    tp: CountingGroup,
    ending: tuple[Loss, Tensor] | None,
    practice: Practice,
    recompute: Sequence[str],
    splits_backward: bool,
) -> tuple[LayerProfile, Any]:
    split = SplitBackward() if splits_backward else None
    tape = Tape(tp)
    kernel = AttentionKernel(tape, practice)
    run: Any = layer
    if "" in recompute:
        run = partial(recomputed, layer, partial(_again, kernel, split))
    elif recompute:
        recompute_parts("", layer, [part.removeprefix(".") for part in recompute], partial(_again, kernel, split))
    for parameter in layer.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_forget)  # type: ignore[no-untyped-call]
    tp.traffic.reset()
    leaves, tree = tree_flatten(value)
    with kernel, tape, split or nullcontext(), _as_it_is_run(kernel):
        given = [_given(leaf) for leaf in leaves]
        came = [(tape.number_of(leaf), leaf.untyped_storage().nbytes()) for leaf in given]
        base = tape.live
        tape.restart_peak()
        start = len(tape.ops)
        handed = tree_unflatten(given, tree)
        try:
            output = run(handed)
            end = output if ending is None else _loss(ending, output, practice)
        except Exception as error:
            what = f"layer {name} ({type(layer).__name__})" + (", or the loss of what it returns," if ending else "")
            raise ModelError(
                "MW-PLANNER-006",
                f"{what} cannot be run without values, on the meta device in the training dtype, to see what it "
                f"holds: {type(error).__name__}: {error}",
            ) from error
        forward_peak = tape.peak - base
        after_forward = len(tape.ops)
        attended = tuple(tape.attended)
        forward_says = _said(tp)
        results = [leaf for leaf in tree_leaves(end) if isinstance(leaf, Tensor)]
        numbers = [tape.number_of(leaf) for leaf in results]
        sizes = [leaf.untyped_storage().nbytes() for leaf in results]
        needs = [leaf.requires_grad for leaf in results]
        specs = tree_map(_spec_of, output)
        roots = [leaf for leaf in results if leaf.requires_grad]
        root = _Begin.apply(tape, *roots) if roots else None  # type: ignore[no-untyped-call]
        del output, end, handed, given, roots
        results.clear()
        alive = tape.alive()
        inputs_kept = tuple(number in alive for number, _ in came)
        kept = tape.live - sum(size for (_, size), is_kept in zip(came, inputs_kept, strict=True) if is_kept)
        kept -= 0 if root is None else root.untyped_storage().nbytes()
        places = {number: place for place, (number, _) in enumerate(came)}
        outputs = tuple(
            Leaf(size, places.get(number), number in alive, need)
            for number, size, need in zip(numbers, sizes, needs, strict=True)
        )
        before = tape.live
        tape.restart_peak()
        if practice.accumulates and ending is None:
            tokens = {leaf.shape[:-1].numel() * ranks for leaf in leaves for ranks in (1, tp.size)}
            weights = {tuple(p.shape) for p in layer.parameters() if p.dim() == 2}
            tape.no_room = weights | {shape[::-1] for shape in weights}, tokens
        notes: Any = None
        if root is not None:
            if split is None:
                root.backward()
            else:
                with split.putting_off() as notes:
                    root.backward()
        backward_peak, from_outside = tape.peak - before, tape.peak_unwatched - before
        after_backward = len(tape.ops)
        backward_says = _said(tp)
        noted = weight_peak = 0
        if notes is not None:
            root = None
            noted = tape.live - sum(_grad_bytes(leaf) for leaf in leaves)
            tape.restart_peak()
            here = tape.live
            accumulate_deferred(notes)
            weight_peak = tape.peak - here
    for leaf in leaves:
        leaf.grad = None
    work = partial(tape.work, practice=practice)
    profile = LayerProfile(
        name,
        work(start, after_forward),
        work(after_forward, after_backward),
        work(after_backward, len(tape.ops)),
        forward_says,
        backward_says,
        sum(parameter.numel() for parameter in layer.parameters()),
        kept,
        inputs_kept,
        outputs,
        forward_peak,
        backward_peak,
        from_outside,
        noted,
        weight_peak,
        attended,
    )
    return profile, tree_map(_like, specs, is_leaf=lambda leaf: isinstance(leaf, _Spec))


def _grad_bytes(leaf: Tensor) -> int:
    return 0 if leaf.grad is None else leaf.grad.untyped_storage().nbytes()


class _Spec(NamedTuple):
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


def _spec_of(leaf: Any) -> Any:
    """Return the shape, stride, dtype and gradient flag of a tensor; any other value unchanged."""
    return _Spec(leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _like(spec: Any) -> Any:
    """Create a new tensor from its spec, as the next layer's input."""
    if not isinstance(spec, _Spec):
        return spec
    fresh = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
    return fresh.requires_grad_(spec.requires_grad)


def _forget(parameter: Tensor) -> None:
    """Drop a gradient after accumulation: in a run it lies in a bucket, which was allocated before."""
    parameter.grad = None


def _said(tp: CountingGroup) -> tuple[GroupMessages, ...]:
    """Return the messages counted since the last call, and reset the counters."""
    counts = {operation: counted for (_, operation), counted in tp.traffic.counts.items()}
    tp.traffic.reset()
    return tuple(GroupMessages(operation, *_numbers(counted)) for operation, counted in counts.items())


def _numbers(counted: Counted) -> tuple[int, float]:
    return counted.calls, counted.wire_bytes


def counting_group(tp: int) -> CountingGroup:
    """Return a fake tensor-parallel group of ``tp`` ranks, seen from rank 0; it counts traffic and sends nothing."""
    return CountingGroup("tp", tuple(range(tp)), 0)
