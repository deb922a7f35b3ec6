"""What each layer does and holds for one micro-batch on one tp rank: the modules that will run, run on the meta device.

    plain model on meta -> split over tp -> one layer after the other, forward and backward, on a Tape

    LayerProfile   work      operations of forward and backward, to be timed on a device
                   messages  what it says to its tp group
                   memory    what it keeps for backward, and how high it gets in forward and in backward

Nothing is written down per model. Layers that are alike, and get alike, are run once.
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
from meshwright.mesh.comm import Counted, PaperGroup
from meshwright.pipeline.outline import outline_of, outline_of_value
from meshwright.pipeline.recompute import recompute_parts, recomputed
from meshwright.pipeline.split_backward import SplitBackward, complete
from meshwright.pipeline.values import Loss
from meshwright.seeding import Draw, SeededDropout
from meshwright.tools.planner.operations import AttentionKernel, LossKernel, Tape, Work
from meshwright.tools.planner.operations import Practice as Practice


class Said(NamedTuple):
    """Messages of one kind within a tp group."""

    operation: str
    calls: int
    wire_bytes: float
    """That one rank puts on the wire, all calls together."""


class Leaf(NamedTuple):
    """A tensor of the value that a layer hands on."""

    bytes: int
    comes_from: int | None
    """It is the tensor (or lies in the storage) that came in as this leaf; None: the layer has made it."""
    kept: bool
    """The layer itself keeps it for its backward."""
    needs_gradient: bool


@dataclass(frozen=True)
class LayerProfile:
    """One layer, one micro-batch, one tp rank; the loss in the last. Bytes are of live tensors."""

    name: str
    forward: tuple[Work, ...]
    backward: tuple[Work, ...]
    weight_half: tuple[Work, ...]
    """Where backward comes in halves, the second one; ``backward`` is then the first."""
    forward_says: tuple[Said, ...]
    backward_says: tuple[Said, ...]
    num_parameters: int
    """Local elements; a weight tied to another layer's counts in both."""
    kept_bytes: int
    """Between forward and backward, without what came in; what goes out is in it if the layer keeps that."""
    inputs_kept: tuple[bool, ...]
    """Which of the tensors that came in the layer keeps."""
    outputs: tuple[Leaf, ...]
    forward_peak: int
    """The highest point in forward, above what was there, without what came in."""
    backward_peak: int
    """The highest point in backward, above what was there and what is kept (which goes bit by bit)."""
    backward_peak_from_outside: int
    """The same, when the gradient that comes in is held elsewhere, and counted there."""
    noted_bytes: int = 0
    """Where backward comes in halves: what is kept between them."""
    weight_peak: int = 0
    """The highest point of the second half, above what was there and what is kept."""
    attended: tuple[tuple[int, int], ...] = ()
    """Of each attention in forward the bytes of its queries, and of its keys and values."""

    @property
    def output_bytes(self) -> int:
        """Of the tensors that it hands on."""
        return sum(leaf.bytes for leaf in self.outputs)


def profile_layers(
    layers: Sequence[tuple[str, nn.Module]],
    inputs: Any,
    labels: Tensor | None,
    *,
    tp: PaperGroup,
    loss: Loss,
    practice: Practice,
    recompute: Sequence[str] = (),
    splits_backward: bool = False,
    seen: dict[Any, tuple[LayerProfile, Any]] | None = None,
) -> tuple[LayerProfile, ...]:
    """Profile every layer, first to last.

    Args:
        layers: by name; split over ``tp`` already, in the training dtype, on meta. One that stands for several is there
            as often.
        inputs: of one micro-batch, on meta; whole, as every tp rank gets them.
        labels: of that micro-batch; None leaves the loss out.
        recompute: names of the layers and modules that run again in backward.
        seen: what has been profiled before under the same arguments but the model's.

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
    """A copy on meta in train mode whose dropouts draw for samples without values."""
    layer = copy.deepcopy(original).to("meta").train()
    for module in layer.modules():
        if isinstance(module, SeededDropout):
            module.draw, module.name = draw, ""
    return layer


class _Given(torch.autograd.Function):
    """Hands a leaf on under a storage of the same size that only the layer holds: so it is seen who keeps it."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return torch.empty_like(leaf)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _given(leaf: Tensor) -> Tensor:
    return _Given.apply(leaf) if leaf.requires_grad else torch.empty_like(leaf)  # type: ignore[no-untyped-call]


class _Begin(torch.autograd.Function):
    """Where the gradients of what a layer hands on come from: made in backward, held by nobody else."""

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
    """Around a layer that runs once more in backward, where the modes of the first time are off."""
    with AttentionKernel(kernel.tape, kernel.practice), split or nullcontext():
        yield


@contextmanager
def _as_it_is_run(kernel: AttentionKernel) -> Iterator[None]:
    """What is kept for backward, and how far what runs again goes."""
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
    tp: PaperGroup,
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
                f"{what} cannot be run without values, on the meta device in the training dtype, to see what it "
                f"holds: {type(error).__name__}: {error}"
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
            complete(notes)
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
    """What is to be known of a tensor to make another one like it."""
    return _Spec(leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _like(spec: Any) -> Any:
    """A tensor of its own, as the next layer gets it."""
    if not isinstance(spec, _Spec):
        return spec
    fresh = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
    return fresh.requires_grad_(spec.requires_grad)


def _forget(parameter: Tensor) -> None:
    """What happens to a gradient when autograd has added it: it lies in a bucket, which was there before."""
    parameter.grad = None


def _said(tp: PaperGroup) -> tuple[Said, ...]:
    """Since this was asked last."""
    counts = {operation: counted for (_, operation), counted in tp.traffic.counts.items()}
    tp.traffic.reset()
    return tuple(Said(operation, *_numbers(counted)) for operation, counted in counts.items())


def _numbers(counted: Counted) -> tuple[int, float]:
    return counted.calls, counted.wire_bytes


def paper_group(tp: int) -> PaperGroup:
    """A tensor-parallel group of so many ranks, seen from the first one, in which nothing is said to anybody."""
    return PaperGroup("tp", tuple(range(tp)), 0)
