"""The table of rotary angles that all blocks share: as exact as angles computed at each call,
and computed once.
"""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright_models import decoder, llama, rotary
from meshwright_models.attention import positions_of, rotate
from meshwright_models.rotary import Rotary

LLAMA31 = llama.RopeScaling(8.0, 1.0, 4.0, 64)
FREQUENCIES = {
    "llama3": llama.rope_frequencies(16, 500_000.0),
    "llama3.1": llama.rope_frequencies(16, 500_000.0, LLAMA31),
    "interpolated": [frequency / 4 for frequency in llama.rope_frequencies(16, 10_000.0)],
}


@pytest.fixture(autouse=True)
def no_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotary, "_TABLES", {})


class Operations(TorchDispatchMode):
    """Counts operators by name and dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.counts[f"{func.overloadpacket.__name__} {result.dtype}"] += 1
        return result


def computed(
    frequencies: list[float], x: Tensor, positions: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute cos and sin of this call's angles in float64. x: (..., S, d); positions: (B, S)
    or None.
    """
    values = torch.tensor(frequencies, dtype=torch.float64)
    if positions is None:
        angles = torch.outer(torch.arange(x.shape[-2], dtype=torch.float64), values)
    else:
        angles = positions[:, None, :, None] * values
    dtype = torch.promote_types(x.dtype, torch.float32)
    return angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("form", FREQUENCIES)
def test_angles_are_bit_equal_to_those_computed_at_each_call(form: str, dtype: torch.dtype) -> None:
    module = Rotary(FREQUENCIES[form])
    # growing and shrinking: a table of an earlier call, and a longer one
    for length in (37, 5, 300, 1037, 299):
        x = torch.zeros(2, 3, length, 16, dtype=dtype)
        starts = torch.rand(2, length) < 0.1
        starts[:, 0] = True
        for positions in (None, positions_of(starts)):
            found = module(x, positions)
            for one, other in zip(found, computed(FREQUENCIES[form], x, positions), strict=True):
                assert one.dtype == other.dtype and torch.equal(one, other)
    assert len(rotary._TABLES) == 1


def small(**options: Any) -> torch.nn.Sequential:
    torch.manual_seed(1)
    return llama.build(31, 32, 3, 4, 2, 48, **options)


def test_one_table_serves_all_blocks_and_microbatches() -> None:
    models = [
        small(),
        decoder.build(
            vocab_size=31,
            hidden_size=32,
            num_layers=2,
            num_heads=4,
            ffn_size=8,
            rope_theta=500_000.0,
        ),
    ]
    ids = torch.arange(22).view(2, 11)
    with Operations() as operations:
        for model in models:
            for _ in range(2):
                model(ids).sum().backward()
    assert [operations.counts[f"{name} torch.float64"] for name in ("cos", "sin")] == [1, 1]
    held = [module for module in models[0].modules() if isinstance(module, Rotary)]
    assert (
        len({module.table(11, torch.device("cpu"), torch.float32).data_ptr() for module in held})
        == 1
    )


def test_modules_hold_no_table() -> None:
    model = small()
    before = pickle.dumps(model.block0.attention.rotary)
    model(torch.arange(11)[None])
    assert pickle.dumps(model.block0.attention.rotary) == before
    assert dict(copy.deepcopy(model).named_buffers()).keys() == dict(model.named_buffers()).keys()
    assert not any("rotary" in name for name in model.state_dict())
    with torch.device("meta"):
        assert small().to("meta")(torch.arange(11)[None]).is_meta


def test_fake_tensors_share_a_table_that_ends_with_their_mode() -> None:
    for _ in range(2):
        with FakeTensorMode(allow_non_fake_inputs=False), Operations() as operations:
            model, ids = small(), torch.empty(1, 11, dtype=torch.int64)
            for _ in range(2):
                model(ids)
        assert [operations.counts[f"{name} torch.float64"] for name in ("cos", "sin")] == [1, 1]


def test_a_dry_run_leaves_no_table_and_reads_none() -> None:
    model, ids = small(), torch.arange(11)[None]
    mode = FakeTensorMode(allow_non_fake_inputs=False)

    def fake() -> None:
        with mode:
            assert type(small()(torch.empty(1, 11, dtype=torch.int64))) is not Tensor

    fake()
    assert not rotary._TABLES
    logits = model(ids)
    assert type(logits) is Tensor
    (table,) = rotary._TABLES.values()
    fake()
    assert list(rotary._TABLES.values()) == [table] and type(table) is Tensor


def test_a_table_made_in_inference_mode_can_train() -> None:
    model, ids = small(), torch.arange(11)[None]
    with torch.inference_mode():
        model(ids)
    model(ids).sum().backward()


def test_a_compiled_block_reads_the_table_without_a_break() -> None:
    class Rotated(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rotary = Rotary(FREQUENCIES["llama3"])

        def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
            return rotate(x, *self.rotary(x, positions))

    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    module = Rotated()
    compiled = torch.compile(module, backend=keep, fullgraph=True)
    for length in (9, 9, 12, 14):
        x = torch.randn(2, 3, length, 16, requires_grad=True)
        positions = torch.arange(length).expand(2, length) % 4
        assert torch.equal(compiled(x), module(x))
        assert torch.equal(compiled(x, positions), module(x, positions))
    assert len(graphs) == 6, "one per length, with and without positions"
    assert not any("cos" in str(node.target) for graph in graphs for node in graph.graph.nodes)
