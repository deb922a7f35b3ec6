"""What a transformers model does between its layers, done by its own code: positions, masks, scalings, softcaps.

The model's own ``forward`` is run with marks in the places of the planned modules. What it does before it calls the
next mark belongs to that layer; so a piece of the pipeline holds one module, and whatever lies in front of it::

    LlamaForCausalLM.forward, with marks             piece "block1" (mark 2)
      embed_tokens   -> mark 0                         hidden (B, S, D), position_ids (B, S)
      rotary_emb(position_ids)  -> cos, sin                |
      create_causal_mask        -> None or mask        frame.call(2, ...): run to mark 2, whose forerunner gives hidden
      layers[0](h, mask, cos)   -> mark 1                  |  -> the arguments that the model calls layers[1] with
      layers[1](h, mask, cos)   -> mark 2   <-- stop   layers[1](*arguments)
      norm(h)                   -> mark 3                  |
      lm_head(h)                -> mark 4              hidden, position_ids
      logits / softcap          -> after the last mark

Nothing here knows a model: no name of an argument, no layout of a mask. Where a model hands the hidden states from one
module to the next as they are, as between all its blocks, all that a micro-batch needs besides is made by one run for
all of them (two small tensors of angles; a mask where a window or documents need one), and kept until the next.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import ModelError
from meshwright.tools.interop.huggingface.restructure.float64 import wide
from meshwright.tools.interop.huggingface.restructure.library import whole_rows

IDS, HIDDEN, POSITIONS, DOCUMENT_POSITIONS = "input_ids", "hidden_states", "position_ids", "document_position_ids"
"""Keys of what goes in and between the layers. Positions that came with the samples may start anew within a row, where
a document does: they go on under a name of their own."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Reached(BaseException):
    """A run has come to the mark that it was for; no ``except Exception`` on the way holds it up."""


class Play:
    """What the marks of one frame do: note how they are called and hand on what they get, up to the one before
    ``target``, which gives ``handed``; the target stops the run."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.positions: dict[str, int] = {}
        """Mark -> its place in the order of the forward; empty until that is known."""
        self.direct: set[int] = set()
        """Those that are handed what the one before has given, and not something made of it."""
        self.met: list[str] = []
        self.last: Any = None
        self.target = -1
        self.handed: Any = None
        self.calls: list[Arguments] = []
        """Of this run, by the marks that it met."""

    def begin(self, target: int, handed: Any) -> None:
        """Before a run."""
        self.target, self.handed, self.calls = target, handed, []

    def enter(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a mark gives, called so."""
        given = first_of(args, kwargs)
        if not self.positions:
            if given is self.last:
                self.direct.add(len(self.met))
            self.met.append(name)
            self.last = given.clone() if given.is_floating_point() else torch.zeros(*given.shape, self.width)
            return self.last
        position = self.positions[name]
        self.calls.append((args, kwargs))
        if position == self.target:
            raise Reached
        return self.handed if position == self.target - 1 and self.handed is not None else given


def first_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What a module works on: what it is called with first."""
    return args[0] if args else next(iter(kwargs.values()))


def with_first(arguments: Arguments, value: Any) -> Arguments:
    """The same call, of another value."""
    args, kwargs = arguments
    if args:
        return (value, *args[1:]), dict(kwargs)
    return (), {**kwargs, next(iter(kwargs)): value}


class Mark(nn.Module):
    """Stands for a planned module; what the model may ask of it without calling it (kind of its attention) stays."""

    def __init__(self, name: str, module: nn.Module, play: Play) -> None:
        super().__init__()
        own = vars(self).keys()
        for attribute, value in vars(module).items():
            if attribute not in own and not isinstance(value, Tensor | nn.Module):
                setattr(self, attribute, value)
        self.mark_name = name
        self.play = play

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.play.enter(self.mark_name, args, kwargs)


class Frame:
    """A transformers model with marks instead of its planned modules. No part of any layer: it holds no weights.

    It keeps its constants (rotary frequencies) for each device, in the precision that the model made them in.
    """

    def __init__(self, model: nn.Module, play: Play, described: str) -> None:
        self._on = {torch.device("cpu"): (model, play)}
        self._kept: tuple[Any, list[Arguments]] = (None, [])
        self.described = described

    def __repr__(self) -> str:
        return f"Frame({self.described})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Frame:
        return self

    def find_order(self) -> list[str]:
        """The marks in the order in which the model's forward meets them, tried on two tokens, and kept to from now."""
        model, play = self._at(torch.device("cpu"))
        play.positions, play.met, play.direct, play.last = {}, [], set(), None
        with torch.no_grad(), whole_rows():
            model(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False)
        play.positions, play.last = {name: position for position, name in enumerate(play.met)}, None
        return play.met

    @property
    def num_marks(self) -> int:
        """Planned modules of the model."""
        return len(self._on[torch.device("cpu")][1].positions)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def call(self, position: int, value: Tensor, positions: Tensor, documents: bool) -> Arguments:
        """What the model calls its module at ``position`` with, when the one before it has given ``value``; at position
        0 that is the token ids (B, S). ``positions`` (B, S), ``documents``: rows may hold several.
        """
        _, play = self._at(value.device)
        if position in play.direct and position > 1:
            return with_first(self._of_all(value, positions, documents)[position], value)
        if position != 1:
            return self._reach(position, value, positions, documents, value if position == 0 else None)[-1]
        # vectors given to the model take the place of its embedding
        arguments = self._reach(position, value, positions, documents, value)[-1]
        if value.shape[1] == positions.shape[1]:
            return arguments
        # of a part of each sequence; masks are of the whole
        return with_first(self._of_all(value, positions, documents)[position], first_of(*arguments))

    def _of_all(self, value: Tensor, positions: Tensor, documents: bool) -> list[Arguments]:
        """How each mark is called for these positions, whatever the hidden states are: the last answer is kept."""
        version = 0 if positions.is_inference() else positions._version
        key = (positions, version, value.dtype, documents, torch.is_inference_mode_enabled())
        kept, calls = self._kept
        if kept is None or kept[0] is not positions or kept[1:] != key[1:]:
            calls = self._reach(self.num_marks - 1, value, positions, documents, None, of_all=True)
            # vectors given to the model take the place of its embedding, which is not met
            calls = [((), {})] * (self.num_marks - len(calls)) + calls
            self._kept = (key, [with_first(call, None) if any(call) else call for call in calls])
            calls = self._kept[1]
        return calls

    def _reach(
        self,
        position: int,
        value: Tensor,
        positions: Tensor,
        documents: bool,
        first: Tensor | None,
        of_all: bool = False,
    ) -> list[Arguments]:
        """How the marks up to ``position`` are called; ``of_all``: when the hidden states are the empty ones."""
        model, play = self._at(value.device)
        try:
            self._run(model, play, position, None if of_all else value, positions, documents, first, value)
        except Reached:
            return play.calls
        finally:
            play.begin(-1, None)
        raise AssertionError(f"{self!r} ended before mark {position}")

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def end(self, value: Tensor, positions: Tensor, documents: bool) -> Tensor:
        """The logits, when the last module has given ``value``: with what the model does after it."""
        model, play = self._at(value.device)
        try:
            logits = self._run(model, play, self.num_marks, value, positions, documents, None, value).logits
        finally:
            play.begin(-1, None)
        assert isinstance(logits, Tensor)
        return logits

    def _run(
        self,
        model: nn.Module,
        play: Play,
        target: int,
        handed: Tensor | None,
        positions: Tensor,
        documents: bool,
        first: Tensor | None,
        like: Tensor,
    ) -> Any:
        """``first``: what the model begins with, ids or vectors; None: empty vectors, of the whole sequence also where
        ``handed`` is a part of it, of the dtype of ``like``."""
        play.begin(target, handed)
        if first is None:
            first = like.new_zeros(()).expand(*positions.shape, play.width)
        key = "inputs_embeds" if first.is_floating_point() else IDS
        with whole_rows(not documents):
            return model(**{key: first}, position_ids=positions if documents else positions[:1], use_cache=False)

    def _at(self, device: torch.device) -> tuple[nn.Module, Play]:
        if device not in self._on:
            model, play = copy.deepcopy(self._on[torch.device("cpu")])
            self._on[device] = (model.to(device), play)
        return self._on[device]


class Piece(nn.Module):
    """One layer of the Sequential: planned modules that follow each other, each with what the model does before it.

    Token ids (B, S), or a dict of ``input_ids`` and ``position_ids`` -> a dict of hidden states (B, S, D) and positions
    (B, S); the last gives logits (B, S, V). Under sequence parallelism hidden states are (B, S/tp, D), positions whole.
    """

    def __init__(self, frame: Frame, first: int, names: Sequence[str], modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.frame = frame
        self.first = first
        self.names = tuple(names)
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, value: Any) -> Any:
        value = {IDS: value} if isinstance(value, Tensor) else value
        numbers = value[HIDDEN] if HIDDEN in value else next(self.parameters())
        with wide(numbers.dtype):
            return self._handed_on(value)

    def _handed_on(self, value: dict[str, Tensor]) -> Any:
        hidden = value[IDS] if IDS in value else value[HIDDEN]
        documents = DOCUMENT_POSITIONS in value or (IDS in value and POSITIONS in value)
        positions = value.get(DOCUMENT_POSITIONS, value.get(POSITIONS))
        if positions is None:
            positions = torch.arange(hidden.shape[1], device=hidden.device).repeat(len(hidden), 1)
        for position, name in enumerate(self.names, self.first):
            args, kwargs = self.frame.call(position, hidden, positions, documents)
            module = self.get_submodule(name)
            hidden = module(*args, **kwargs)
            if not isinstance(hidden, Tensor):
                raise ModelError(
                    f"{name} ({type(module).__name__}) hands on a {type(hidden).__name__}, and what goes on to the "
                    f"next stage must be one tensor of hidden states"
                )
        if self.first + len(self.names) == self.frame.num_marks:
            return self.frame.end(hidden, positions, documents)
        return {HIDDEN: hidden, DOCUMENT_POSITIONS if documents else POSITIONS: positions}
