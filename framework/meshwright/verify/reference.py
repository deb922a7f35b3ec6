"""Plain reference run: the user's untouched ``builder()`` module in one process, a Python loop over
the samples, and torch's own loss, clipping and optimizer.

No parallel code runs here: no stage, schedule, bucket or sharding, and no rebuilt model. Hooks,
parametrizations, buffers and ``nn.Dropout`` modules are the user's own. The framework provides two
inputs: initial values, by name, and dropout masks, by their published definition
(:mod:`meshwright.verify.dropout`). The reference shares with the layouts only the definitions of
equal inputs: initial values and samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.config import Model, Run, RunConfig, samples_after
from meshwright.config.functions import error_place
from meshwright.config.sections import Adapter
from meshwright.current import CurrentMicrobatch
from meshwright.data.sources import Source, example
from meshwright.errors import ModelError, UserError
from meshwright.expert_parallel.routing import NO_ROUTING, RankTokens, RoutingHooks, RoutingPlan
from meshwright.fp8.linear import Fp8Linear
from meshwright.model.buffers import cast_running, cast_statistics, running_buffers, running_values
from meshwright.model.build import PlainModel, configured_model
from meshwright.model.builder import find_builder
from meshwright.model.metrics import Recorder, Recording
from meshwright.model.own_attention import use_own_attention
from meshwright.pipeline.values import IGNORED_LABEL, MetaMicrobatch, cast_floats
from meshwright.tracking.observer import step_key
from meshwright.verify.checksums import checksums
from meshwright.verify.dropout import KeyedDropout
from meshwright.verify.initial import copy_random_buffers, plain_seed
from meshwright.verify.near_ties import NearestTie, TieWatch
from meshwright.verify.plain_adapter import use_adapters
from meshwright.verify.plain_formulas import averaged
from meshwright.verify.plain_fp8 import use_fp8
from meshwright.verify.plain_loss import plain_loss
from meshwright.verify.plain_optimizer import plain_optimizer
from meshwright.verify.plain_rate import plain_rate
from meshwright.verify.plain_scale import PlainScale
from meshwright.verify.plain_state import begin_state, end_state, metrics_of, widened
from meshwright.verify.routes import validation_key


class RunNumbers(NamedTuple):
    """Numbers of a run, per step and per parameter. Tensors are whole, unpadded, on CPU,
    under their canonical names.

    Running buffers are included in the initial values and in the weights.
    """

    losses: list[float]
    grad_norms: list[float]
    tokens: list[dict[int, int]]
    """Per step, then per validation pass:
    global sample index -> checksum of its token ids and labels.
    """
    initial: dict[str, Tensor]
    gradients: dict[str, Tensor]
    """Gradients of step 1, before clipping."""
    weights: dict[str, Tensor]
    """Weights after the last step."""
    masters: dict[str, Tensor]
    """Master weights after the last step;
    empty where the optimizer steps the weights themselves.
    """
    validation: list[float]
    """Loss in eval mode on one global batch, after the first step and after the last."""
    metrics: list[dict[str, float]]
    """Metrics that layers and the loss recorded: per step,
    each followed by those of its validation.
    """
    rates: list[float]
    """Learning rate of each step."""
    scales: list[float]
    """Loss scale of each step; 1 unless the run computes in float16."""
    stepped: Mapping[str, Tensor]
    """Weights after the first step."""
    lost: Sequence[str] = ()
    """Parts of the state that a checkpoint in the middle of the run did not bring back;
    of layouts only.
    """
    resumed_after: int = 0
    """Step after which the run was stopped, saved and resumed; 0: never."""
    nearest_tie: NearestTie = NearestTie()
    """Closest choice of a router; set by the plain run only."""


def untouched_layers(
    keys: Model, adapter: Adapter, run: Run, model: PlainModel, dtype: torch.dtype
) -> nn.Sequential:
    """Return the module that the user's builder returns, with its initial values, in ``dtype``.

    Parameters stay the builder's own objects, constant buffers unchanged (random ones are
    ``model``'s). Declared ties that the builder does not share become one parameter. ``model``
    supplies the ties, and the initial values that it draws by name; where the builder's own are
    used, they stay as plain torch has them under ``run.seed``. ``keys``: the section that ``model``
    was built from.
    """
    with plain_seed(run, model):
        layers: nn.Sequential = find_builder(keys.builder)(**keys.options)
        use_own_attention(layers, keys.attention)
        use_adapters(layers, adapter)
    if model.builder_run is None:
        copy_random_buffers(layers, keys, run.seed, model)
    for name, parameter in list(layers.named_parameters(remove_duplicate=False)):
        canonical, (owner_name, _, attribute) = model.canonical(name), name.rpartition(".")
        owner = layers.get_submodule(owner_name)
        if canonical != name and layers.get_parameter(canonical) is not parameter:
            owner._parameters[attribute] = layers.get_parameter(canonical)
        elif parameter.is_meta:  # the builder left it on meta, for the framework to fill
            shared = [
                n for n, p in layers.named_parameters(remove_duplicate=False) if p is parameter
            ]
            real = nn.Parameter(
                torch.empty_like(parameter, device="cpu"), requires_grad=parameter.requires_grad
            )
            for other in shared:
                layers.get_submodule(other.rpartition(".")[0])._parameters[
                    other.rpartition(".")[2]
                ] = real
    model.freeze(layers)
    with torch.no_grad():
        for name, parameter in layers.named_parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
            if not (model.is_built(name) and model.initialise is None):
                parameter.copy_(model.initial(name))
    return layers


class PlainRun:
    """Training state of the plain model in one process.
    See :func:`run_reference` for the arguments.
    """

    def __init__(
        self,
        config: RunConfig,
        source: Source,
        dtype: torch.dtype,
        micro_batch_size: int,
        factor: float = 1.0,
        routing: RoutingPlan = NO_ROUTING,
    ) -> None:
        assert config.batch.global_batch is not None
        self.config = config
        self.source = source
        self.dtype = dtype
        self.micro_batch_size = micro_batch_size
        self.loss_factor = factor
        self.global_batch = config.batch.global_batch
        model = configured_model(config)
        outline = MetaMicrobatch(*example(config.data, micro_batch_size))
        self.running = running_buffers(model.layers, outline.cast(torch.float32).inputs)
        self.layers = untouched_layers(config.model, config.adapter, config.run, model, dtype)
        names = [
            name for name, module in model.layers.named_modules() if isinstance(module, Fp8Linear)
        ]
        use_fp8(self.layers, names)
        cast_running(self.layers, self.running, dtype)
        cast_statistics(self.layers, dtype)
        self.dropout = KeyedDropout(self.layers, config.run.seed)
        self.loss = getattr(self.layers, "loss", None)
        self.ties = TieWatch(self.layers)
        self.current = CurrentMicrobatch()
        tokens = RankTokens(
            outline.labels.shape[1] if outline.labels.dim() > 1 else 1, self.current
        )
        self.routes = RoutingHooks(routing, [self.layers], self.layers, tokens)
        self.parameters = {
            model.canonical(n): p for n, p in self.layers.named_parameters() if p.requires_grad
        }
        self.frozen = {
            model.canonical(n): p for n, p in self.layers.named_parameters() if not p.requires_grad
        }
        self.labels_per_step = self.global_batch * outline.labels_per_sample
        self.masters = self.parameters
        """Tensors that the optimizer steps: the weights; for 16 bits,
        float32 copies with float32 gradients.
        """
        if dtype.itemsize == 2:
            self.masters = {
                name: nn.Parameter(p.detach().float()) for name, p in self.parameters.items()
            }
        self.optimizer = plain_optimizer(
            self.masters, config.optimizer, model.groups, model.matrices, dtype, config.run.seed
        )
        self.scale = PlainScale(config.loss_scale) if dtype == torch.float16 else None
        self.taken = 0
        """Optimizer steps taken; skipped ones do not count."""

    def values(self) -> dict[str, Tensor]:
        """Return copies of weights and running buffers, by canonical name."""
        weights = {
            name: p.detach().clone() for name, p in {**self.parameters, **self.frozen}.items()
        }
        return weights | widened(running_values(self.layers, self.running))

    def microbatches(self, samples: range) -> list[tuple[Any, Tensor, Tensor]]:
        """Return (inputs, labels, sample indices (B,)) of the micro-batches of these samples,
        in order.
        """
        size = self.micro_batch_size
        return [
            (*self.source.read(range(at, at + size)), torch.arange(at, at + size))
            for at in samples[::size]
        ]

    def loss_sum(
        self, inputs: Any, labels: Tensor, sample_indices: Tensor, *, training: bool = True
    ) -> Tensor:
        """Return the loss summed over the labels that count: the model's own loss,
        or cross-entropy.

        Label smoothing and z-loss of the model apply in training only.
        """
        self.dropout.begin(sample_indices)
        self.current.sample_indices = sample_indices
        wide = torch.promote_types(self.dtype, torch.float32)  # the loss is computed in float32
        output, labels = (
            cast_floats(self.layers(cast_floats(inputs, self.dtype)), wide),
            cast_floats(labels, wide),
        )
        if self.loss is not None:
            losses: Tensor = self.loss(output, labels)
            return losses[labels != IGNORED_LABEL].sum()
        return plain_loss(self.layers, output, labels, training=training)

    def step(self, step: int, findings: RunNumbers) -> None:
        """Run one optimizer step on global batch ``step``, counted from 0,
        and append its numbers to ``findings``.
        """
        samples = range(*(samples_after(self.config.batch, each) for each in (step, step + 1)))
        batch = self.microbatches(samples)
        num_tokens = max(sum(int((labels != IGNORED_LABEL).sum()) for _, labels, _ in batch), 1)
        # 8- and 16-bit gradients must be rounded as in a layout, which divides the loss by all
        # label positions
        rounds = self.dtype.itemsize == 2 or self.config.train.linear == "fp8"
        divisor = self.labels_per_step if rounds else num_tokens / self.loss_factor
        scale = 1.0 if self.scale is None else self.scale.value
        before = begin_state(self.layers, self.running, scale / divisor)
        for master in self.masters.values():
            master.grad = torch.zeros_like(master)  # zero, not None: unused weights still decay
        recorder, total = Recorder(), 0.0
        with self.routes.during(step_key(step + 1), samples):
            for inputs, labels, sample_indices in batch:
                with Recording(recorder):
                    loss_sum = self.loss_sum(inputs, labels, sample_indices)
                total += float(loss_sum.detach())
                (loss_sum / divisor * scale).backward()  # type: ignore[no-untyped-call]
                if self.dtype.itemsize == 2:  # a long sum in 16 bits would lose most of its bits
                    self._accumulate()
        for master in self.masters.values():
            assert master.grad is not None
            master.grad *= divisor / num_tokens / scale
        if step == 0:
            # clipping is in place
            findings.gradients.update({n: _gradient(p) for n, p in self.masters.items()})
        norm = torch.nn.utils.clip_grad_norm_(
            self.masters.values(), self.config.optimizer.clip_norm or float("inf")
        )
        overflows = not math.isfinite(norm)
        rate = self._set_rate(step)
        if not overflows or self.scale is None:
            self.optimizer.step()
            self.taken += 1
        sums = end_state(self.layers, before if overflows else {})
        if self.scale is not None:
            self.scale.update(found_inf=overflows)
        if self.masters is not self.parameters:
            with torch.no_grad():
                for name, parameter in self.parameters.items():
                    parameter.copy_(self.masters[name])
        findings.losses.append(total / num_tokens)
        findings.grad_norms.append(math.inf if overflows else float(norm))
        findings.metrics.append(metrics_of(recorder) | sums)
        findings.tokens.append(checksums(batch))
        findings.rates.append(rate)
        findings.scales.append(scale)

    def _set_rate(self, step: int) -> float:
        """Set the learning rate of step ``step``, counted from 0, in the optimizer's groups,
        and return it.
        """
        leaves_out_skipped = self.config.optimizer.spec.averages_weights
        index = self.taken if leaves_out_skipped else step
        rate = plain_rate(self.config.optimizer, index + 1, self.config.train.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("rate_factor", 1.0)
        return rate

    def _accumulate(self) -> None:
        """Add the gradients of the weights to the float32 gradients of the master weights,
        and clear them.
        """
        for name, parameter in self.parameters.items():
            gradient = self.masters[name].grad
            assert gradient is not None
            if parameter.grad is not None:
                gradient += parameter.grad
                parameter.grad = None

    def validate(self, after: int, batch_index: int, findings: RunNumbers) -> None:
        """Append the loss of global batch ``batch_index`` in eval mode, after ``after`` steps,
        to ``findings``.
        """
        modes = {module: module.training for module in self.layers.modules()}
        self.layers.eval()
        samples = range(batch_index * self.global_batch, (batch_index + 1) * self.global_batch)
        batch, recorder = self.microbatches(samples), Recorder()
        states = averaged(self.optimizer, self.masters, self.parameters)
        routed = self.routes.during(validation_key(after, batch_index), samples, is_needed=False)
        with torch.no_grad(), states, Recording(recorder), routed:
            total = sum(float(self.loss_sum(*microbatch, training=False)) for microbatch in batch)
        # modules that the builder has put into eval mode stay in it
        for module, training in modes.items():
            module.training = training
        num_tokens = sum(int((labels != IGNORED_LABEL).sum()) for _, labels, _ in batch)
        findings.validation.append(total / max(num_tokens, 1))
        findings.tokens.append(checksums(batch))
        findings.metrics.append(metrics_of(recorder))


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.detach().clone()


def validated_after(steps: int) -> list[int]:
    """Return the steps after which a run validates. Step 1 is among them,
    to test the return to train mode.
    """
    return sorted({1, steps})


@contextmanager
def _explained(model: Model) -> Iterator[None]:
    """Turn an error of the user's model in plain torch into one ModelError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise ModelError(
            "MW-VERIFY-009",
            f"the plain run of {model.builder} failed{error_place(error)}:"
            f" {type(error).__name__}: {error}. verify compares layouts with the model in plain"
            " torch: call the builder and train its module in a loop of one sample at a time,"
            " until that works",
        ) from error


def run_reference(
    config: RunConfig,
    source: Source,
    steps: int,
    dtype: torch.dtype,
    micro_batch_size: int = 1,
    factor: float = 1.0,
    routing: RoutingPlan = NO_ROUTING,
) -> RunNumbers:
    """Train the plain model for ``steps`` steps and return its findings.

    Args:
        config: resolved; ``batch.global_batch`` is the number of samples of a step.
        micro_batch_size: samples per forward; changes only rounding unless samples depend on each
            other (BatchNorm).
        factor: multiplies the loss in backward and is divided out of the gradients afterwards;
            changes only rounding.
        routing: recording or replay of the routers' choices.

    Raises:
        ModelError: the model does not run in plain torch.
    """
    with _explained(config.model):
        run = PlainRun(config, source, dtype, micro_batch_size, factor, routing)
        findings = RunNumbers([], [], [], run.values(), {}, {}, {}, [], [], [], [], {})
        with run.dropout.installed():
            for step in range(steps):
                run.step(step, findings)
                if step == 0:
                    findings = findings._replace(stepped=run.values())
                if step + 1 in validated_after(steps):
                    run.validate(step + 1, steps, findings)
    findings.weights.update(run.values())
    if run.masters is not run.parameters:
        findings.masters.update({name: p.detach().clone() for name, p in run.masters.items()})
    return findings._replace(nearest_tie=run.ties.nearest)
