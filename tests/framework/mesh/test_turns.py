"""Two computations in turns: their order, their state,
and what becomes of one when the other fails.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from meshwright.mesh.turns import Turns
from tests.support.cuda.library import compile_library, find_compiler
from tests.support.cuda.process import run_child


def keep() -> Callable[[], None]:
    return lambda: None


def paused(turns: Turns, said: list[str], name: str, times: int) -> Callable[[], None]:
    def run() -> None:
        for number in range(times):
            said.append(f"{name}{number}")
            turns.pause()
        said.append(f"{name} ends")

    return run


@pytest.mark.parametrize(
    ("first", "second", "order"),
    [
        (2, 2, "a0 b0 a1 b1 a ends b ends"),
        (3, 1, "a0 b0 a1 b ends a2 a ends"),
        (0, 2, "a ends b0 b1 b ends"),
        (1, 3, "a0 b0 a ends b1 b2 b ends"),
    ],
)
def test_turns_alternate_and_the_longer_one_goes_on_alone(
    first: int, second: int, order: str
) -> None:
    turns, said = Turns(), list[str]()
    turns.pause()  # of no pair
    for _ in range(3):  # one thread serves them all
        said.clear()
        turns.run(paused(turns, said, "a", first), paused(turns, said, "b", second), keep)
        assert " ".join(said) == order


def test_each_has_its_own_state() -> None:
    turns, state, seen = Turns(), {"sample": 0}, list[tuple[str, int]]()

    def save() -> Callable[[], None]:
        value = dict(state)
        return lambda: state.update(value)

    def run(name: str, value: int) -> Callable[[], None]:
        def found() -> None:
            seen.append((name, state["sample"]))
            state["sample"] = value
            for _ in range(2):
                turns.pause()
                seen.append((name, state["sample"]))

        return found

    state["sample"] = 7
    turns.run(run("a", 1), run("b", 2), save)
    assert seen == [("a", 7), ("b", 7), ("a", 1), ("b", 2), ("a", 1), ("b", 2)]


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("pauses", [0, 1])
def test_a_failure_ends_both(which: int, pauses: int) -> None:
    turns, said = Turns(), list[str]()

    def fails() -> None:
        for _ in range(pauses):
            turns.pause()
        raise ValueError("no memory")

    def goes_on() -> None:
        try:
            for _ in range(5):
                turns.pause()
            said.append("went on")
        finally:
            said.append("cleaned up")

    both = (fails, goes_on) if which == 0 else (goes_on, fails)
    with pytest.raises(ValueError, match="no memory"):
        turns.run(*both, keep)
    assert said == (["cleaned up"] if (which, pauses) != (0, 0) else [])  # the second had not begun
    said.clear()
    turns.run(paused(turns, said, "a", 1), paused(turns, said, "b", 1), keep)
    assert " ".join(said) == "a0 b0 a ends b ends"


def test_backward_pauses_inside_autograd() -> None:
    """A pause in a custom backward, with a forward in between, and in a recompute."""
    turns, said = Turns(), list[str]()

    class Pausing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            turns.pause()
            return x * 2

        @staticmethod
        def backward(ctx: object, g: torch.Tensor) -> torch.Tensor:
            said.append("b")
            turns.pause()
            return g * 2

    def layer(x: torch.Tensor) -> torch.Tensor:
        said.append("f")
        y: torch.Tensor = Pausing.apply(x.sin())  # type: ignore[no-untyped-call]
        return y

    x, z = (torch.ones(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).sum()
    said.clear()

    def forward() -> None:
        with torch.no_grad():
            layer(layer(z))

    turns.run(forward, y.backward, keep)
    assert said == ["f", "b", "f", "f"]  # forward, backward, forward, recompute
    assert torch.equal(x.grad, 2 * x.detach().cos())  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
@pytest.mark.skipif(
    torch.version.cuda is not None, reason="torch is built with CUDA: it has hooks of its own"
)
def test_a_forward_may_take_a_gradient_on_cuda(tmp_path: Path) -> None:
    """Autograd has one thread for the device, which a paused backward would keep."""
    done = run_child("tests.framework.mesh.gradient_in_turns", compile_library(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "backward pauses",
        "forward has its gradient",
        "backward goes on",
    ]
