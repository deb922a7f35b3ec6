"""Orders of tokens: each token on one rank, equally many on each,
and the balance that an order is chosen for.
"""

from __future__ import annotations

import importlib
import random
from pathlib import Path

import numpy as np
import pytest

from meshwright.context_parallel.balance import batch_imbalance
from meshwright.context_parallel.order import (
    ORDERS,
    KeyCount,
    Places,
    contiguous,
    documents,
    draw,
    zigzag,
)
from tests.support.seen_keys import imbalance, keys_seen

SIZES = [(8, 1), (8, 2), (12, 4), (20, 4), (21, 3), (64, 8), (7, 7)]


def check_partition(ranks: list[Places], length: int, cp: int) -> None:
    assert len(ranks) == cp
    assert sorted(place for places in ranks for place in places) == list(range(length))
    assert all(len(places) == length // cp and list(places) == sorted(places) for places in ranks)


@pytest.mark.parametrize(("length", "cp"), SIZES)
def test_each_token_is_on_one_rank(length: int, cp: int) -> None:
    for order in ORDERS.values():
        check_partition(order(length, cp), length, cp)
    rng = random.Random(length)
    for block in (1, 3, 128):
        starts = rng.sample(range(length), 2)
        check_partition(documents(length, cp, starts, block), length, cp)


def test_the_picture_of_the_page() -> None:
    assert contiguous(8, 2) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert zigzag(8, 2) == [(0, 1, 6, 7), (2, 3, 4, 5)]
    seen = keys_seen(8)
    assert [sum(seen[place] for place in places) for places in contiguous(8, 2)] == [10, 26]
    assert [sum(seen[place] for place in places) for places in zigzag(8, 2)] == [18, 18]
    assert draw(zigzag(8, 2)) == "cp0   ##....##\ncp1   ..####.."


def test_a_query_sees_its_document_up_to_itself() -> None:
    rng = random.Random(3)
    for window in (None, 1, 3, 40):
        starts = sorted({0, *rng.sample(range(30), 4)})
        document = [sum(start <= place for start in starts) for place in range(30)]
        expected = [
            sum(
                document[key] == document[query] and (window is None or query - key < window)
                for key in range(query + 1)
            )
            for query in range(30)
        ]
        assert keys_seen(30, starts, window) == expected


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_zigzag_balances_one_document_and_blocks_balance_many(cp: int) -> None:
    length = 4096
    one = keys_seen(length)
    assert imbalance(zigzag(length, cp), one) < 1e-12 < 0.4 < imbalance(contiguous(length, cp), one)
    rng = random.Random(cp)
    starts = sorted({0, *(int(length * rng.random() ** 3) for _ in range(12))})
    many = keys_seen(length, starts)
    dealt = documents(length, cp, starts, block=32)
    assert imbalance(dealt, many) < 0.1 < imbalance(contiguous(length, cp), many)
    assert imbalance(dealt, many) < imbalance(zigzag(length, cp), many)


def test_keys_of_runs_without_a_loop_over_tokens() -> None:
    rng = random.Random(5)
    starts = [0, 0, 4, 5, 17, 60]
    seen, keys = keys_seen(40, starts), KeyCount(40, starts)
    for _ in range(50):
        first, last = sorted(rng.choices(range(41), k=2))
        assert keys.seen_by(range(first, last)) == sum(seen[first:last])


def test_a_batch_waits_for_its_busiest_rank_at_a_time() -> None:
    """Ranks that are busy in turn lose as much as one that always is;
    samples of one micro-batch even out.
    """
    late, half = np.zeros(64, dtype=bool), [0, 32]
    late[half] = True
    for order in ORDERS:
        of_one = batch_imbalance(order, 4, [[late]])
        assert batch_imbalance(order, 4, [[late], [late]]) == pytest.approx(of_one)
        ranks = documents(64, 4, half) if order == "documents" else ORDERS[order](64, 4)
        assert of_one == pytest.approx(imbalance(ranks, keys_seen(64, half)))
    first, last = np.zeros(4, dtype=bool), np.array([False, False, True, True])
    assert batch_imbalance("contiguous", 2, [[first], [last]]) == pytest.approx(
        (7 + 3) / (10 / 2 + 5 / 2) - 1
    )
    assert batch_imbalance("contiguous", 2, [[first, last]]) == pytest.approx(9 / (15 / 2) - 1)


def test_the_table_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    lines = importlib.import_module("context_balance").table(131_072, 8, 4)
    page = (Path(__file__).parents[3] / "docs" / "long-context.md").read_text()
    assert "\n".join(lines) in page, "\n".join(lines)
