"""Run-time checks of a stage's layers, most of them in the first forward of training only,
and their errors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import CheckpointError

from meshwright.current import CurrentMicrobatch
from meshwright.errors import ModelError
from meshwright.model.buffers import INSTEAD
from meshwright.model.metrics import Recording
from meshwright.pipeline.plan.standalone import BY_NAME, is_drawing
from meshwright.pipeline.values import IGNORED_LABEL, Loss, TensorSpec, ValueSpec

OUT_OF_RANGE = re.compile(r"index out of range(:| in self)|Target -?\d+ is out of bounds")
"""Errors of embeddings and of cross-entropy on the CPU, whole (torch's) or split over tp."""


class InspectedLayer:
    """Wrapper of a layer in its first training forward:
    checks that it keeps no state and draws no random numbers.
    """

    def __init__(self, name: str, layer: nn.Module, running: Collection[str]) -> None:
        self.name = name
        self.layer = layer
        self.running = running

    def __call__(self, value: Any) -> Any:
        """Run the layer.

        Raises:
            ModelError: it changes a buffer that it did not change on meta, or uses torch's
                generator. Its result would depend on the layout, and on whether the
                run was resumed.
        """
        constant = {
            key: buffer
            for key, buffer in self.layer.named_buffers()
            if f"{self.name}.{key}" not in self.running
        }
        before = {key: (buffer._version, buffer.clone()) for key, buffer in constant.items()}
        drawn = _generator_states()
        value = self.layer(value)
        for key, (version, numbers) in before.items():
            now = self.layer.get_buffer(key)
            if now is not constant[key] or now._version != version or not _same(now, numbers):
                raise ModelError(
                    "MW-PIPELINE-019",
                    f"layer {self.name} changes its buffer {key} in forward, and did not do so on"
                    " the meta device, where the run was planned: it would be in no checkpoint."
                    f" Write it in place (self.{key}.mul_(...)) and not under `if not x.is_meta`,"
                    f" or {INSTEAD}",
                )
        if drawn != _generator_states():
            raise ModelError(
                "MW-PIPELINE-020",
                f"layer {self.name} draws from torch's random generator in forward: the draw would"
                f" differ between layouts and after a resume. {BY_NAME}",
            )
        return value


class BackwardWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode of a stage's first backward: finds layers that run again there by themselves."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and is_drawing(func, args, kwargs or {}):
            raise ModelError(
                "MW-MODEL-061",
                f"{func._schema.name.removeprefix('aten::')} draws random numbers inside backward:"
                " a layer that computes itself again (torch.utils.checkpoint) would drop other"
                " elements than in its first forward. Use pipeline.recompute for the layer instead"
                " (docs/recompute.md), or p = 0",
            )
        return func(*args, **(kwargs or {}))


def _generator_states() -> list[bytes | int]:
    """Return the states of torch's default generators: the CPU's,
    and the offset of each CUDA device's, without a sync.

    A CUDA generator draws at positions of a fixed Philox stream; its offset is kept on the host.
    """
    cuda = [generator.get_offset() for generator in torch.cuda.default_generators]
    return [torch.default_generator.get_state().numpy().tobytes(), *cuda]


def _same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same shape and values, with NaN equal to NaN."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def check_outputs(
    outputs: Sequence[Tensor], spec: ValueSpec, layers: nn.Sequential, stage: int, train: bool
) -> None:
    """Check the outputs of a stage against the shapes and dtypes that the next stage has allocated.

    Raises:
        ModelError: they differ.
    """
    expected = spec.leaves
    fits = len(outputs) == len(expected)
    for tensor, leaf in zip(outputs, expected, strict=False):
        fits = fits and tensor.shape == leaf.shape and tensor.dtype == leaf.dtype
    if fits:
        return
    raise ModelError(
        "MW-PIPELINE-015",
        f"layer {list(layers._modules)[-1]}, the last of stage {stage}, returns {_shapes(outputs)}"
        f" in {'training' if train else 'eval mode'}, and {_shapes(expected)} on the meta device in"
        " training, where the run was planned: the next stage has room for that only. Give the"
        " same shapes and dtypes in train and eval mode, on every device and for all data (a dtype"
        " that torch.autocast chooses: .to() it at the end)",
    )


def _shapes(leaves: Sequence[Tensor | TensorSpec]) -> str:
    """Return the shapes and dtypes of leaves as text."""
    return (
        ", ".join(
            f"{tuple(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}" for leaf in leaves
        )
        or "nothing"
    )


def check_ignored(loss: Loss, output: Any, labels: Tensor) -> None:
    """Raise :class:`ModelError` unless the loss is zero where labels are ignored.
    Computes the loss once more.

    All labels (B, ...) are replaced by ``IGNORED_LABEL``. Other labels than integers are not
    checked: float ones are masked after the loss.
    """
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        return
    with torch.no_grad(), Recording(None):
        cloned = tree_map(lambda leaf: leaf.clone(), output)
        losses = loss(cloned, torch.full_like(labels, IGNORED_LABEL))
    if torch.equal(losses, torch.zeros_like(losses)):
        return
    raise ModelError(
        "MW-PIPELINE-034",
        f"model.loss gives {float(losses[losses != 0].flatten()[0]):.6g} for a label of"
        f" {IGNORED_LABEL}: such a label is ignored, it is not counted in the mean, and its loss"
        f" must be zero. Pass ignore_index={IGNORED_LABEL} to F.cross_entropy, or end with"
        f" .masked_fill(labels == {IGNORED_LABEL}, 0.0)",
    )


def explained(
    place: str, current: CurrentMicrobatch, function: Callable[..., Any], *arguments: Any
) -> Any:
    """Return ``function(*arguments)``; errors that :func:`advise` recognises get its message."""
    try:
        return function(*arguments)
    except (RuntimeError, IndexError) as error:
        advise(place, error, current.sample_indices)
        raise


def advise(place: str, error: RuntimeError | IndexError, samples: Tensor | None) -> None:
    """Raise :class:`ModelError` if ``error`` has a known cause:
    an index out of range in ``samples`` (B,), ZeRO-3.
    """
    if OUT_OF_RANGE.match(str(error)):
        numbers = None if samples is None else samples.tolist()
        raise ModelError(
            "MW-PIPELINE-036",
            f"{place}, samples {numbers}: {str(error).rstrip('.')}. One has an id or label that the"
            " model does not have: ids are from 0 to the size of their table - 1, labels to the"
            f" number of classes - 1, or {IGNORED_LABEL} where they do not count. Correct the data,"
            " or the sizes in model.options",
        ) from error
    if "mixed torch.Tensor and DTensor" in str(error):
        raise ModelError(
            "MW-PIPELINE-016",
            f"{place} uses a weight that several modules share without calling its module: with"
            " parallel.zero = 3 torch gathers a weight when its module is called. Call it"
            " (self.table(ids) for F.embedding(ids, self.table.weight)), or choose"
            " parallel.zero = 2",
        ) from error
    if "modified inplace" in str(error) and "RegisterPostBackward" in str(error):
        raise ModelError(
            "MW-PIPELINE-017",
            f"{place} changes its input in place: with parallel.zero = 3 torch has a hook on the"
            " gradient of that input. Write x = x + y for x += y, or choose parallel.zero = 2",
        ) from error


def nested_checkpoint(stage: int, error: CheckpointError) -> ModelError:
    """Return the error for a layer that uses torch.utils.checkpoint itself under a split backward."""
    return ModelError(
        "MW-PIPELINE-018",
        f"a layer of stage {stage} computes itself again in backward (torch.utils.checkpoint),"
        " outside of what splits this schedule's backward into halves: take it out and set"
        " pipeline.recompute, or choose 1f1b or interleaved_1f1b. torch says:"
        f" {str(error).splitlines()[0]}",
    )
