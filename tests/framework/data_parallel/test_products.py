"""Weight gradients that the GEMM adds to the buckets. A CPU computes the same sums in float32:
that is checked here.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.build import build
from meshwright.config import RunConfig
from meshwright.data_parallel import products as products_module
from meshwright.data_parallel.products import add_product, adds_products
from meshwright.mesh.grid import Grid
from meshwright.mesh.mesh import open_mesh
from meshwright.parameters import WeightProduct
from meshwright.pipeline.plan import SplitBackward, accumulate_deferred
from meshwright.step import take_step
from meshwright.verify import layout_config, parse_layout
from meshwright.verify.rank import open_verify_source
from meshwright_launch.pool import RankPool
from tests.framework.data_parallel.test_replica import WIDTH, gradients_of, replica_of, sample

BF16 = torch.bfloat16
LLAMA = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_size": 48,
}


def is_matrix(parameter: Tensor, dtype: torch.dtype) -> bool:
    """Stand for ``adds_products`` on a device with the kernel."""
    return parameter.dim() == 2 and parameter.dtype == BF16


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products_module, "adds_products", is_matrix)


@pytest.mark.parametrize("keeps_gradient", [True, False])
@pytest.mark.usefixtures("on_cpu")
def test_products_are_summed_in_float32(keeps_gradient: bool) -> None:
    """Whole and split backwards in one step, over what the last step left;
    a weight used twice counts once.
    """
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)).to(BF16)
    (weight,) = layers.parameters()
    replica = replica_of(layers, keeps_gradient=keeps_gradient)
    split = SplitBackward()
    for step in range(2):
        expected = torch.zeros(WIDTH, WIDTH)
        replica.begin_step()
        for microbatch in range(3):
            x, gy, last = sample(microbatch, BF16), sample(9 + step, BF16), microbatch == 2
            with split:
                y = torch.cat([layers(x), layers(2 * x)])
            products = [(gy, 2 * x), (gy, x)]  # in the order of backward
            if microbatch == 1:
                y.backward(torch.cat([gy, gy]))
            else:
                with split.deferring() as deferred:
                    y.backward(torch.cat([gy, gy]))
                if last:
                    replica.reduce_during_backward({weight})
                    assert replica._missing == [1]
                accumulate_deferred(deferred)
            for each, value in products:
                expected.addmm_(each.float().t(), value.float())
        assert replica._missing == [0] and weight.grad is None
        assert torch.equal(gradients_of(replica)["0.weight"], expected)
        replica.finish_reduction()


@pytest.mark.parametrize("keeps_gradient", [True, False])
@pytest.mark.usefixtures("on_cpu")
def test_a_fused_last_backward_counts_its_products(keeps_gradient: bool) -> None:
    """A whole backward leaves no gradient in ``grad``: its buckets are reduced while it runs."""
    layers = nn.Sequential(
        nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
    ).to(BF16)
    replica = replica_of(layers, bucket_bytes=1, keeps_gradient=keeps_gradient)
    last, first = (bucket.slots[0].member.parameter for bucket in replica.buckets)
    reduced: list[str] = []
    for bucket, name in zip(replica.buckets, ("last", "first"), strict=True):
        bucket.reduce = lambda *, last, name=name: reduced.append(name)  # type: ignore[method-assign]
    replica.begin_step()
    for is_last in (False, True):
        if is_last:
            replica.reduce_during_backward()
            assert replica._missing == [1, 1]
        with SplitBackward():
            y = layers(sample(0, BF16))
        y.backward(sample(1, BF16))
    assert last.grad is None and first.grad is None
    assert replica._missing == [0, 0] and reduced == ["last", "first"]


@pytest.mark.usefixtures("on_cpu")
def test_a_gradient_within_forward_is_not_added() -> None:
    """``autograd.grad`` runs the backward of a linear without asking for its weight's gradient."""
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)).to(BF16)
    replica = replica_of(layers)
    replica.begin_step()
    x = sample(0, BF16).requires_grad_()
    with SplitBackward():
        y = layers(x)
    torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert not gradients_of(replica)["0.weight"].any()
    y.sum().backward()
    assert gradients_of(replica)["0.weight"].any()


class Trained(NamedTuple):
    losses: list[float]
    grad_norms: list[float]
    num_products: int


def train(rank: int, world_size: int, config: RunConfig) -> Trained:
    parallel, num_products = config.parallel, 0
    assert isinstance(parallel.dp, int)

    def counted(*args: Any, **kwargs: Any) -> None:
        nonlocal num_products
        num_products += 1
        add_product(*args, **kwargs)

    with (
        patch.object(products_module, "adds_products", is_matrix),
        patch.object(products_module, "add_product", counted),
    ):
        mesh = open_mesh(Grid(pp=parallel.pp, dp=parallel.dp, tp=parallel.tp), config.train.device)
        parts = build(config, mesh, (open_verify_source(config, random_tokens=True), {}))
        stats = [take_step(parts) for _ in range(2)]
    return Trained([each.loss for each in stats], [each.grad_norm for each in stats], num_products)


@pytest.mark.long
def test_layouts_agree(pool: RankPool) -> None:
    """Schedules with the same products in the same order are bit-equal;
    others agree as bfloat16 does.
    """
    found = {}
    for layout in ("pp2,zb_h1", "pp2,zb_h2", "pp2,tp2,sequence,zb_v"):
        size = parse_layout(layout).size
        config = RunConfig.model_validate(
            {
                "model": {"builder": "meshwright_models.llama:build", "options": LLAMA},
                "data": {"train": "none", "sequence_length": 16},
                "batch": {"micro_batch_size": 1, "chunks": 4},
            }
        )
        ranks = pool.run(train, size, layout_config(config, parse_layout(layout), 8, "bfloat16"))
        assert all(rank.num_products for rank in ranks)
        found[layout] = ranks[0][:2]
    first = found.pop("pp2,zb_h1")
    assert found.pop("pp2,zb_h2") == first
    for losses, norms in found.values():
        assert losses == pytest.approx(first[0], rel=1e-2)
        assert norms == pytest.approx(first[1], rel=2e-2)


class Kernels(TorchDispatchMode):
    """Counts kernels and the bytes of new tensors; views are neither."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.new_bytes = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (
            isinstance(result, Tensor)
            and not func.is_view
            and str(func) != "aten._unsafe_view.default"
        ):
            self.kernels += 1
            if not any(result is each for each in (*args, *(kwargs or {}).values())):
                self.new_bytes += math.prod(result.shape) * result.dtype.itemsize
        return result


@pytest.mark.skipif(
    torch.__version__.startswith(("2.11.", "2.12.")), reason="no meta tensors into a sum"
)
def test_a_gemm_instead_of_two_kernels_and_a_tensor() -> None:
    """A Llama-3-8B's gate and up, 8,192 tokens, on tensors without memory:
    no bfloat16 gradient of 235 MB.
    """
    with torch.device("meta"):
        gy, x = torch.empty(8192, 28672, dtype=BF16), torch.empty(8192, 4096, dtype=BF16)
        total = torch.empty(28672, 4096)
    with Kernels() as plain:
        total.add_(WeightProduct(gy, x)())
    with Kernels() as fused:
        add_product(total, WeightProduct(gy, x), first=False)
    assert (plain.kernels, plain.new_bytes) == (2, 2 * 28672 * 4096)
    assert (fused.kernels, fused.new_bytes) == (1, 0)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_a_cpu_has_no_such_kernel(dtype: torch.dtype) -> None:
    assert not adds_products(torch.empty(4, 4, dtype=dtype), torch.float32)
    factor = torch.ones(4, 4, dtype=BF16)
    with pytest.raises(RuntimeError, match="addmm"):
        torch.ops.aten.addmm.dtype_out(
            torch.zeros(4, 4), factor, factor, torch.float32, out=torch.zeros(4, 4)
        )
