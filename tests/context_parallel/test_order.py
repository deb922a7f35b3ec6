"""Orders of tokens: each token on one rank, equally many on each, and the balance that an order is chosen for."""

from __future__ import annotations

import random

import pytest

from meshwright.context_parallel.order import ORDERS, Places, contiguous, documents, draw, imbalance, keys_seen, zigzag

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
