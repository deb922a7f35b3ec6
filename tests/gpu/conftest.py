"""A process that CUDA may be used in."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest


@pytest.fixture(scope="module")
def on_device() -> Iterator[Callable[..., Any]]:
    """``on_device(function, *args)``: in one process that is nobody's fork."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        yield lambda function, *args, **options: executor.submit(
            function, *args, **options
        ).result()
