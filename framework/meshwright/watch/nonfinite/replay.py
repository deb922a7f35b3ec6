"""Replay of a step that checks each output and gradient as it is computed,
to find the first NaN or Inf.

Hooks on all modules see outputs; hooks on all parameters see gradients. The index of a module call
within one forward is the same on all ranks of a tensor-parallel group. Gradients are not reduced,
and the optimizer does not step.

Hooks are not called within compiled layers, so these run without torch.compile. Other compiled
functions stay compiled: FlexAttention's plain code would make all scores, S x S for each head.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from meshwright.data_parallel.sharding import BucketSlot, ShardedParameters
from meshwright.parameters import GradientSum
from meshwright.parts import Parts
from meshwright.pipeline.executor import RowResult
from meshwright.pipeline.stage import LossPart, Stage
from meshwright.pipeline.values import Feed
from meshwright.schedule.action import Kind
from meshwright.watch.nonfinite.evidence import (
    MAX_FINDINGS,
    Evidence,
    EvidenceKind,
    backward_order,
    broken,
)

PRIVATE_TORCH = {
    "torch.nn.Module._compiled_call_impl": "2.11-2.15",
}
"""Private names of torch, and the oldest and the newest version in which they were found."""


def positions_of(stage: Stage) -> dict[int, int]:
    """Return the position of each parameter in the stage, by ``id``;
    roughly the order of forward.
    """
    return {id(parameter): position for position, parameter in enumerate(stage.layers.parameters())}


def losses(parts: Parts, feed: Feed, result: RowResult, ranks: tuple[int, ...]) -> list[Evidence]:
    """Return the micro-batch losses of the last stage that are not finite;
    empty on ranks without that stage.
    """
    last = len(parts.blueprint.stages) - 1
    forwards = [
        span.action
        for span in result.times.spans
        if span.action.kind is Kind.F and span.action.stage == last
    ]
    evidence = []
    for action, part in zip(forwards, result.loss_parts, strict=True):
        problem = broken(part.loss_sum)
        if problem is not None:
            assert action.microbatch is not None
            samples = tuple(feed.sample_indices(action.microbatch).tolist())
            loss = str(part.loss_sum.item())
            at = parts.mesh.at.dp_rank
            evidence.append(
                Evidence(
                    EvidenceKind.LOSS, ranks, last, 0, "", loss, at, action.microbatch, samples
                )
            )
    return evidence


def compiled_layers(parts: Parts) -> list[nn.Module]:
    """Return this rank's layers to which torch.compile is applied."""
    layers = [layer for stage in parts.executor.stages.values() for layer in stage.layers]
    return [layer for layer in layers if layer._compiled_call_impl is not None]


def replay_step(parts: Parts, feed: Feed) -> list[Evidence]:
    """Replay the step, forward and backward,
    and return the first values on this rank that are not finite.

    Collective over all ranks; blocks. Gradients are not reduced over replicas and stay in the
    buckets. The optimizer does not step.
    """
    executor = replace(parts.executor, replicas={}, ep=None)
    stages = [_StageChecks(parts, feed, stage) for stage in executor.stages.values()]
    with contextlib.ExitStack() as within:
        for layer in compiled_layers(parts):
            within.enter_context(_replaced(layer, "_compiled_call_impl", None))
        for checks in stages:
            within.enter_context(checks.installed())
        result = executor.run(feed)
    evidence = [each for checks in stages for each in checks.findings()]
    return evidence + losses(parts, feed, result, (parts.mesh.rank,))[:MAX_FINDINGS]


@contextlib.contextmanager
def _replaced(target: object, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of one object within the ``with`` block."""
    own = vars(target).get(name, _replaced)
    setattr(target, name, value)
    try:
        yield
    finally:
        if own is _replaced:
            delattr(target, name)
        else:
            setattr(target, name, own)


def _call_both(
    first: Callable[[Tensor], None], second: Callable[[Tensor], None], parameter: Tensor
) -> None:
    first(parameter)
    second(parameter)


class _StageChecks:
    """Hooks that check each output and each gradient of one stage as it is computed."""

    def __init__(self, parts: Parts, feed: Feed, stage: Stage) -> None:
        self.parts = parts
        self.feed = feed
        self.stage = stage
        self.replica = parts.replicas[stage.index]
        self.outputs: dict[int, Evidence] = {}
        """First output that is not finite, by micro-batch."""
        self.gradients: dict[int, Evidence] = {}
        """First finding of each parameter's gradient, by position,
        with the micro-batch that caused it.
        """
        self._positions = positions_of(stage)
        self._microbatch: int | None = None
        self._forward = False
        self._num_calls = 0

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Install hooks on all modules and parameters within the ``with`` block;
        gradients start at zero.
        """
        handles: list[RemovableHandle] = []
        hooks: list[tuple[Tensor, Callable[[Tensor], None]]] = []
        for name, module in self.stage.layers.named_modules():
            if module is not self.stage.layers:  # a container that is never called
                handles.append(module.register_forward_hook(self._output_hook(name)))
        for bucket in self.replica.buckets:
            # a hook may run before the first gradient is written to it
            if bucket.flat_gradient is not None:
                bucket.flat_gradient.zero_()
            for slot in bucket.slots:
                hook = self._gradient_hook(bucket, slot)
                leaf = bucket.leaf(slot)
                handles.append(leaf.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
                hooks.append((leaf, hook))
        self.replica.begin_step()
        with contextlib.ExitStack() as within:
            for leaf, hook in hooks:
                total: GradientSum | None = getattr(leaf, "gradient_sum", None)
                if total is not None:  # in W no hook of autograd runs
                    finish = partial(_call_both, total.finish, hook)
                    within.enter_context(
                        _replaced(leaf, "gradient_sum", total._replace(finish=finish))
                    )
            for name in ("backward", "backward_input", "backward_weight"):
                within.enter_context(
                    _replaced(self.stage, name, self._during(getattr(self.stage, name)))
                )
            within.enter_context(_replaced(self.stage, "forward", self._during_forward))
            try:
                yield
            finally:
                for handle in handles:
                    handle.remove()

    def findings(self) -> list[Evidence]:
        """Return the first findings: at most ``MAX_FINDINGS`` outputs
        and ``MAX_FINDINGS`` gradients.
        """
        first = [self.outputs[microbatch] for microbatch in sorted(self.outputs)][:MAX_FINDINGS]
        return first + sorted(self.gradients.values(), key=backward_order)[:MAX_FINDINGS]

    def _during(self, backward: Any) -> Any:
        def run(microbatch: int, *arguments: Any) -> Any:
            self._microbatch = microbatch
            try:
                return backward(microbatch, *arguments)
            finally:
                self._microbatch = None

        return run

    def _during_forward(
        self,
        microbatch: int,
        inputs: Any,
        labels: Tensor | None,
        *,
        train: bool,
        length: int | None = None,
    ) -> Any:
        self._microbatch, self._forward, self._num_calls = microbatch, True, 0
        if self.stage.input_spec is None:
            self._note(EvidenceKind.INPUT, -1, "", inputs)
        try:
            output: list[Tensor] | LossPart = type(self.stage).forward(
                self.stage, microbatch, inputs, labels, train=train, length=length
            )
            return output
        finally:
            self._microbatch, self._forward = None, False

    def _output_hook(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if self._forward:  # activation checkpointing recomputes in backward: already checked
                self._num_calls += 1
                self._note(EvidenceKind.OUTPUT, self._num_calls, name, output)

        return hook

    def _note(self, kind: EvidenceKind, position: int, name: str, value: Any) -> None:
        """Record a micro-batch's first value that is not finite,
        with the samples whose rows are affected.

        ``value``: tensors (B, ...), this rank's shard; rows are matched to samples if dim 0 has
            their number.
        """
        microbatch = self._microbatch
        if microbatch is None or microbatch in self.outputs:
            return
        samples = self.feed.sample_indices(microbatch).tolist()
        for leaf in tree_leaves(value):
            if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
                continue
            leaf = leaf.detach()
            bad = leaf.isnan() | leaf.isposinf()  # -inf is the value of attention masks
            if not bad.any():
                continue
            if leaf.dim() > 0 and leaf.shape[0] == len(samples):
                rows = bad.flatten(1).any(1).tolist() if leaf.dim() > 1 else bad.tolist()
                samples = [sample for sample, row in zip(samples, rows, strict=True) if row]
            self.outputs[microbatch] = self._evidence(
                kind, position, name, str(broken(leaf)), microbatch, samples
            )
            return

    def _gradient_hook(self, bucket: ShardedParameters, slot: BucketSlot) -> Any:
        position = self._positions[id(slot.member.parameter)]

        # runs after the replica's hook, which moves the gradient to the bucket
        def hook(parameter: Tensor) -> None:
            microbatch = self._microbatch
            if microbatch is None or position in self.gradients:
                return
            problem = broken(bucket.gradient_of(slot), is_gradient=True)
            if problem is not None:
                samples = self.feed.sample_indices(microbatch).tolist()
                name = slot.member.info.name
                self.gradients[position] = self._evidence(
                    EvidenceKind.GRADIENT, position, name, problem, microbatch, samples
                )

        return hook

    def _evidence(
        self,
        kind: EvidenceKind,
        position: int,
        name: str,
        problem: str,
        microbatch: int,
        samples: Sequence[int],
    ) -> Evidence:
        mesh = self.parts.mesh
        return Evidence(
            kind,
            (mesh.rank,),
            self.stage.index,
            position,
            name,
            problem,
            mesh.at.dp_rank,
            microbatch,
            tuple(samples),
        )
