"""What recomputation saves and what it costs: measured, and equal to formulas. B S D: batch,
sequence, hidden; float32.

H query heads and G key-value groups of d elements, F feed-forward, L blocks. Bytes are those of the
storages that autograd keeps between F and B for a micro-batch, without parameters and without what
the loss keeps; FLOPs are those of matrix products, forward and backward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from meshwright.build import build
from meshwright.config.combinations.layout import Layout
from meshwright.mesh.grid import Grid
from meshwright.mesh.mesh import open_mesh
from meshwright.parts import StepFeed
from meshwright.verify.layouts import layout_config
from meshwright.verify.rank import open_verify_source
from tests.framework.pipeline.kept import KeptBytes, MadeBytes
from tests.framework.verify.cases import config_of
from tests.support.errors import raises
from tests.support.marks import mark_all_rows_but

B, S, D, H, F, L, V = 2, 6, 16, 4, 24, 2, 13
d = D // H
BSD = 4 * B * S * D
"""Bytes of one activation."""
GROUPS = {"gpt2": H, "llama": 2}
MODELS = [(model, dropout) for model in GROUPS for dropout in (0.0, 0.1)]


class Cost(NamedTuple):
    """Of one micro-batch through the whole model."""

    kept_bytes: int
    made_bytes: int
    """Bytes that the forward made and that live until the backward."""
    flops: int
    gradients: list[Tensor]


def fused_flops(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> int:
    """Of the CPU's fused attention, which torch does not count: two products,
    backward not asked for.
    """
    (b, h, s, width), t = q, k[2]
    return 4 * b * h * s * t * width


def measure(model: str, dropout: float, mode: str, layers: list[str] | None = None) -> Cost:
    """Through build() and the stage, as a run does it."""
    options: dict[str, Any] = {
        "vocab_size": V,
        "hidden_size": D,
        "num_layers": L,
        "num_heads": H,
        "ffn_size": F,
    }
    options |= {"max_sequence_length": S, "dropout": dropout}
    if model == "llama":
        options["num_kv_heads"] = GROUPS[model]
    config = config_of(f"meshwright_models.{model}:build", options, S)
    config = layout_config(config, Layout(recompute=mode, micro_batch_size=B), B, "float32")
    if layers is not None:
        pipeline = config.pipeline.model_copy(update={"recompute_layers": layers})
        config = config.model_copy(update={"pipeline": pipeline})
    parts = build(config, open_mesh(Grid(), "cpu"), (open_verify_source(config, True), {}))
    stage = parts.executor.stages[0]
    kept = KeptBytes([stage.layers])
    loss = stage.loss

    def loss_apart(output: Any, labels: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            return loss(output, labels)

    stage.loss = loss_apart
    microbatch = StepFeed(parts, parts.source, 0).microbatch(0)
    parts.blueprint.model.current.sample_indices = microbatch.sample_indices
    for replica in parts.replicas.values():
        replica.begin_step()
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with FlopCounterMode(display=False, custom_mapping={fused: fused_flops}) as counter:
        with kept.watching(), MadeBytes() as made:
            stage.forward(0, microbatch.inputs, microbatch.labels, train=True)
        kept_bytes, made_bytes = kept.bytes(), made.bytes()
        stage.backward(0, None)
    gradients = [
        bucket.open_gradient().clone()
        for replica in parts.replicas.values()
        for bucket in replica.buckets
    ]
    return Cost(kept_bytes, made_bytes, counter.get_total_flops(), gradients)


def arguments_of_core(model: str) -> int:
    """Return bytes that q, k and v hold alive: views of the fused projection; rotated,
    q and k are tensors of their own.
    """
    groups = GROUPS[model]
    return 4 * B * S * d * ((H + 2 * groups) + (H + groups if model == "llama" else 0))


def kept_by_core(model: str, dropout: float) -> int:
    """Return bytes that attention's core keeps beyond its arguments, which are kept in any case."""
    # the fused kernel: the log of each query's sum, and the output where ``out`` takes a copy of it
    if dropout == 0:
        return 4 * B * H * S + (BSD if model == "llama" else 0)
    probabilities = B * H * S * S * (4 + 1 + 4)  # softmax's, the mask in bytes, the dropped ones
    future = S * S  # the causal mask, in bytes
    # q, k, v as batched products take them, a key and value for each head; not their arguments
    operands = 3 * BSD
    return probabilities + future + operands - arguments_of_core(model)


def kept_by_block(model: str, dropout: float) -> int:
    """Return bytes of one block that keeps everything."""
    if model == "gpt2":
        # of each: what goes in and what comes out, mean, 1 / deviation
        norms = 2 * (2 * BSD + 2 * 4 * B * S)
        mlp = 4 * B * S * 2 * F  # before GELU and after
    else:
        norms = 2 * (3 * BSD + 4 * B * S)  # of each: in, normalised, out, 1 / root mean square
        mlp = 4 * B * S * 4 * F  # gate, up, silu(gate), their product
    # and what ``out`` takes
    attention = arguments_of_core(model) + kept_by_core(model, dropout) + BSD
    dropped = 2 * B * S * D if dropout else 0  # the masks at the ends of both branches, in bytes
    return norms + attention + mlp + dropped


def kept_outside(model: str, dropout: float) -> int:
    """Return bytes of embedding, norm and head."""
    # ids, positions, mask
    embedding = 8 * B * S + (8 * S if model == "gpt2" else 0) + (B * S * D if dropout else 0)
    norm = BSD + 2 * 4 * B * S if model == "gpt2" else 2 * BSD + 4 * B * S
    return embedding + norm + BSD


@mark_all_rows_but("long", "llama-0.0")
@pytest.mark.parametrize(("model", "dropout"), MODELS)
def test_bytes_and_flops_are_those_of_the_formulas(model: str, dropout: float) -> None:
    """And gradients bit-equal: the second forward is the first one again, masks and all.

    torch stops the second forward when all that backward wants is there: a product that ends what
    is recomputed is not computed again, unless something after it keeps its result (dropout's mask
    is drawn after it).
    """
    none, selective, full = (
        measure(model, dropout, mode) for mode in ("none", "selective", "full")
    )
    assert none.kept_bytes == L * kept_by_block(model, dropout) + kept_outside(model, dropout)
    assert selective.kept_bytes == none.kept_bytes - L * kept_by_core(model, dropout)
    # token ids; the input of each block, norm and head
    assert full.kept_bytes == 8 * B * S + (L + 2) * BSD
    product = 2 * B * H * S * S * d  # scores, or their mixture
    assert selective.flops - none.flops == L * (product if dropout else 2 * product)
    linears = 2 * B * S * D * ((H + 2 * GROUPS[model]) * d + D + (2 if model == "gpt2" else 3) * F)
    not_again = 0 if dropout else 2 * B * S * F * D
    assert full.flops - none.flops == L * (linears + 2 * product - not_again)
    for other in (selective, full):
        for found, expected in zip(other.gradients, none.gradients, strict=True):
            assert torch.equal(found, expected)


def made_again(model: str, dropout: float) -> int:
    """Return bytes of one block that ``pointwise`` does not keep."""
    dropped = 4 * B * H * S * S if dropout else 0
    if model == "gpt2":
        return 2 * BSD + 4 * B * S * F + dropped  # what the norms return; after GELU
    # what ``out`` takes; rotated q and k
    copied = 0 if dropout else BSD + 4 * B * S * d * (H + GROUPS[model])
    # normalised, times the weight; silu(gate), times up
    return 4 * BSD + 4 * B * S * 2 * F + copied + dropped


@mark_all_rows_but("long", "gpt2-0.0")
@pytest.mark.parametrize(("model", "dropout"), MODELS)
def test_pointwise_operations_alone(model: str, dropout: float) -> None:
    """No product runs again, and gradients are bit-equal.
    The last norm's output is kept by the head, another layer.
    """
    _, none, pointwise = (measure(model, dropout, mode) for mode in ("none", "none", "pointwise"))
    # the first one of a process makes rotary tables, which are kept
    last_norm = BSD if model == "llama" else 0
    assert none.made_bytes - pointwise.made_bytes == L * made_again(model, dropout) + last_norm
    assert pointwise.flops == none.flops
    for found, expected in zip(pointwise.gradients, none.gradients, strict=True):
        assert torch.equal(found, expected)


def test_only_the_layers_that_are_named() -> None:
    """A pattern per layer: of two blocks one is recomputed,
    and each choice moves by one block's worth.
    """
    none, one, both = (
        measure("gpt2", 0.1, mode, layers)
        for mode, layers in (("none", None), ("full", ["block1"]), ("full", ["block*"]))
    )
    assert none.kept_bytes - one.kept_bytes == one.kept_bytes - both.kept_bytes
    assert one.flops - none.flops == both.flops - one.flops > 0
    half = measure("gpt2", 0.1, "selective", ["block0"])
    assert none.kept_bytes - half.kept_bytes == kept_by_core("gpt2", 0.1)


def test_a_pattern_that_fits_no_layer() -> None:
    with raises("MW-PLACEMENT-001", "pipeline.recompute_layers", "'blocks*'", "block0"):
        measure("gpt2", 0.0, "full", ["blocks*"])


def test_a_model_that_does_not_say_what_is_cheap() -> None:
    config = layout_config(
        config_of("tests.support.builders:plain", {}, S),
        Layout(recompute="selective"),
        2,
        "float32",
    )
    with raises("MW-PIPELINE-006"):
        build(config, open_mesh(Grid(), "cpu"), (open_verify_source(config, True), {}))
