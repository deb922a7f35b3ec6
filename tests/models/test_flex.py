"""Attention by FlexAttention: which cases take it, its tiles against dense masks, and its numbers.

On a CPU torch refuses FlexAttention's backward, although it has one: its plain form, which a test
may enter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from meshwright.context_parallel.order import ORDERS
from meshwright.pipeline.pointwise import pointwise_recomputed
from meshwright.pipeline.split_backward import SplitBackward
from meshwright_models import attention, flex
from meshwright_models.attention import AttentionCore, documents_of
from meshwright_models.flex import TILE, Case, Form, block_mask, form_of, tiles_of
from meshwright_models.some_queries import first_seen
from tests.support.marks import marked_rows

GPU = Case("cuda", torch.bfloat16, 128, 8192, has_documents=True)
CPU = Case("cpu", torch.float32, 64, 8192, has_documents=True, reads=True)
LENGTHS = [1, TILE - 1, TILE, TILE + 1, 3 * TILE, 300, 515]
WINDOWS = [None, 1, 2, 60, TILE, TILE + 1, 2 * TILE - 1, 2 * TILE, 200, 10**6]


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (GPU, "flex"),
        (GPU._replace(dtype=torch.float32, head_dim=64), "flex"),
        (GPU._replace(has_documents=False, window=512), "flex"),
        (GPU._replace(has_documents=False, window=8192), "causal"),
        (GPU._replace(has_documents=False), "causal"),
        (GPU._replace(drops=True), "probabilities"),
        (GPU._replace(dtype=torch.float64), "blocks"),
        (GPU._replace(head_dim=8), "blocks"),
        (GPU._replace(head_dim=320), "blocks"),
        (GPU._replace(length=TILE - 1), "blocks"),
        (GPU._replace(compiles=False), "blocks"),
        (GPU._replace(version=(2, 10)), "blocks"),
        (GPU._replace(version=(2, 13)), "flex"),
        (CPU, "by document"),
        (CPU._replace(reads=False), "blocks"),
        (CPU._replace(has_documents=False, window=512), "blocks"),
        (CPU._replace(has_documents=False), "causal"),
        (CPU._replace(drops=True), "probabilities"),
        (CPU._replace(device="meta", reads=False), "blocks"),
    ],
)
def test_which_form_a_case_takes(case: Case, expected: Form) -> None:
    assert form_of(case) == expected


def drawn_starts(length: int, share: float, samples: int = 2) -> Tensor:
    starts = torch.rand(samples, length) < share
    starts[:, 0] = True
    return starts


def dense(document: Tensor | None, window: int | None, length: int) -> Tensor:
    """Pairs that are seen, (B or 1, S, S) bool."""
    i = torch.arange(length)
    distance = i[:, None] - i
    seen = ((distance >= 0) & (distance < (window or length)))[None]
    return seen if document is None else seen & (document[:, :, None] == document[:, None, :])


def in_tiles(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Tiles with a seen pair, and tiles of seen pairs alone; places after the end are not seen."""
    beyond = -pairs.shape[-1] % TILE
    tiles = (
        torch.nn.functional.pad(pairs, (0, beyond, 0, beyond))
        .unflatten(2, (-1, TILE))
        .unflatten(1, (-1, TILE))
    )
    return tiles.any(4).any(2), tiles.all(4).all(2)


def from_lists(counts: Tensor, columns: Tensor) -> Tensor:
    """Tiles of lists (B, 1, N) and (B, 1, N, N): the first ``counts`` columns of each row."""
    listed = torch.arange(columns.shape[-1]) < counts[..., None]
    return torch.zeros_like(columns).scatter_add_(-1, columns.long(), listed.int()).bool()[:, 0]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("share", [None, 0.0, 0.004, 0.02, 0.5])
def test_tiles_are_those_of_the_dense_mask(length: int, share: float | None) -> None:
    torch.manual_seed(length)
    starts = None if share is None else drawn_starts(length, share)
    document = None if starts is None else documents_of(starts)
    for window in WINDOWS:
        pairs = dense(document, window, length)
        some, whole = in_tiles(pairs)
        places = torch.arange(length)[None]
        first = first_seen(places, starts, window)
        found, full = tiles_of(places, first, length)
        assert torch.equal(full[:, 0], whole) and torch.equal(found[:, 0], some & ~whole), window
        mask = block_mask(places.expand(len(first), -1), first, length)
        for kind, tiles in (("", some & ~whole), ("full_", whole)):
            of_keys = [getattr(mask, f"{kind}kv_{name}") for name in ("num_blocks", "indices")]
            of_queries = [getattr(mask, f"{kind}q_{name}") for name in ("num_blocks", "indices")]
            assert torch.equal(from_lists(*of_keys), tiles)
            assert torch.equal(from_lists(*of_queries), tiles.transpose(1, 2)), (
                "what backward goes through"
            )
        b, q, k = (
            torch.arange(n).view(shape)
            for n, shape in zip(pairs.shape, ((-1, 1, 1), (-1, 1), (-1,)), strict=True)
        )
        assert torch.equal(mask.mask_mod(b, torch.tensor(0), q, k).expand_as(pairs), pairs)


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Cases are CUDA's, and torch's plain form of FlexAttention runs, with its backward."""
    decide = partial(_decide, attention.form_of)
    monkeypatch.setattr(attention, "form_of", decide)
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
    compiled = torch.compile(flex.attend_in_tiles, backend="aot_eager")
    monkeypatch.setattr(flex, "_compiled", lambda: compiled)
    yield
    torch.compiler.reset()


def _decide(real: Callable[[Case], Form], case: Case) -> Form:
    return real(case._replace(device="cuda", reads=False, compiles=True))


def check(
    core: Callable[..., Tensor],
    window: int | None,
    starts: Tensor | None,
    around: Callable[..., Tensor],
) -> None:
    """Compare output and gradients with those of a dense mask."""
    length = 200
    q, k, v = (torch.randn(2, heads, length, 16, requires_grad=True) for heads in (4, 2, 2))
    document = None if starts is None else documents_of(starts)
    pairs = dense(document, window, length)[:, None]
    with torch.no_grad():
        upstream = torch.randn_like(q)
    wide = (t.repeat_interleave(2, dim=1) for t in (k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, *wide, pairs)
    found = around(core, q, k, v, None, starts)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    wanted = torch.autograd.grad(expected, (q, k, v), upstream)
    for mine, theirs in zip(torch.autograd.grad(found, (q, k, v), upstream), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def plainly(core: Callable[..., Tensor], *args: Any) -> Tensor:
    return core(*args)


def split(core: Callable[..., Tensor], *args: Any) -> Tensor:
    with SplitBackward():
        return core(*args)


@pytest.mark.long
def test_numbers_of_documents_and_windows(as_on_cuda: None) -> None:
    """Compiled once for all documents; under the modes of a split backward and
    of pointwise recompute too.
    """
    torch.manual_seed(0)
    torch._dynamo.utils.counters.clear()
    core = AttentionCore(77)
    for around in (plainly, plainly, pointwise_recomputed):
        check(core, 77, drawn_starts(200, 0.03), around)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    check(core, 77, None, plainly)


@pytest.mark.long
@pytest.mark.parametrize("around", [plainly, split])
@pytest.mark.parametrize("window", [None, 77])
def test_numbers_in_a_compiled_layer(
    as_on_cuda: None, window: int | None, around: Callable[..., Tensor]
) -> None:
    core = AttentionCore(window)
    check(core, window, drawn_starts(200, 0.03), split)
    compiled = torch.compile(core, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        check(compiled, window, drawn_starts(200, 0.03), around)


@marked_rows("long", "None-None-zigzag", "77-None-contiguous", "200-0.004-zigzag")
@marked_rows(
    "torture", "None-None-contiguous", "77-None-zigzag", "None-0.02-zigzag", "200-0.004-contiguous"
)
@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize(
    ("window", "share"), [(None, None), (77, None), (None, 0.02), (200, 0.004)]
)
def test_numbers_of_the_queries_of_a_context_parallel_rank(
    as_on_cuda: None, order: str, window: int | None, share: float | None
) -> None:
    """All queries at once against all keys; tiles of a pair that is seen are not skipped."""
    torch.manual_seed(0)
    length, core = 768, AttentionCore(window)
    starts = None if share is None else drawn_starts(length, share)
    pairs = dense(None if starts is None else documents_of(starts), window, length)
    k, v = (torch.randn(2, 2, length, 16, requires_grad=True) for _ in range(2))
    for of_rank in ORDERS[order](length, 2):
        places = torch.tensor([of_rank])
        q = torch.randn(2, 4, len(of_rank), 16, requires_grad=True)
        some, whole = in_tiles(pairs[:, of_rank])
        first = first_seen(places, starts, window)
        partial, full = tiles_of(places.expand(len(first), -1), first, length)
        assert torch.equal(full[:, 0], whole)
        assert bool(((partial | full)[:, 0] | ~some).all())
        assert core.query_blocks(q, k, v, None, starts, places=places, length=length) == [
            slice(0, len(of_rank))
        ]
        found = core(q, k, v, None, starts, places)
        wide = (t.repeat_interleave(2, dim=1) for t in (k, v))
        expected = torch.nn.functional.scaled_dot_product_attention(
            q, *wide, pairs[:, None, of_rank]
        )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        upstream = torch.randn_like(q)
        wanted = torch.autograd.grad(expected, (q, k, v), upstream)
        for mine, theirs in zip(
            torch.autograd.grad(found, (q, k, v), upstream), wanted, strict=True
        ):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_a_kernel_goes_through_these_tiles_alone() -> None:
    """torch's CPU kernel skips tiles as CUDA's does; the plain form above looks at all pairs."""
    torch.manual_seed(0)
    attend = torch.compile(flex.attend_in_tiles)
    for share in (0.004, 0.03):
        length = 700
        starts, places = drawn_starts(length, share), torch.arange(length)[None]
        q, k, v = (torch.randn(2, heads, length, 16) for heads in (4, 2, 2))
        wide = (t.repeat_interleave(2, dim=1) for t in (k, v))
        expected = torch.nn.functional.scaled_dot_product_attention(
            q, *wide, dense(documents_of(starts), None, length)[:, None]
        )
        found = attend(
            q,
            k,
            v,
            *(
                each.int().expand(2, -1).contiguous()
                for each in (places, first_seen(places, starts, None))
            ),
            None,
        )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
