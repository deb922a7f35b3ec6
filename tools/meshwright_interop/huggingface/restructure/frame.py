"""Computations of a transformers model between its layers (positions, masks, scalings, softcaps),
run by its own code.

The model's own ``forward`` runs with placeholder modules, the marks, in place of its planned
modules. Computations before the call of a mark belong to the layer of that mark. A piece of the
pipeline thus holds one module, and performs the computations in front of it::

    LlamaForCausalLM.forward, with marks             piece "block1" (mark 2)
      embed_tokens   -> mark 0                         hidden (B, S, D), position_ids (B, S)
      rotary_emb(position_ids)  -> cos, sin                |
      create_causal_mask        -> None or mask        frame.call(2, ...): run up to mark 2; mark 1 returns hidden
      layers[0](h, mask, cos)   -> mark 1                  |  -> the arguments of the model's call of layers[1]
      layers[1](h, mask, cos)   -> mark 2   <-- stop   layers[1](*arguments)
      norm(h)                   -> mark 3                  |
      lm_head(h)                -> mark 4              hidden, position_ids
      logits / softcap          -> after the last mark

Nothing here depends on a particular model: no names of arguments, no layout of masks. Between
blocks a model passes the hidden states on unchanged. For such marks one run per micro-batch
computes the other arguments of all of them, and they are cached until the next micro-batch: two
small tensors of rotary angles, and a mask if windows or documents need one.

Under context parallelism the run is of whole samples, too. Arguments indexed by token, such as
angles, are then cut to this rank's tokens (places.py), and masks are replaced by rules
(attention.py).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import ModelError
from meshwright_interop.huggingface.restructure.attention import registered
from meshwright_interop.huggingface.restructure.constants import constants_on
from meshwright_interop.huggingface.restructure.float64 import keep_float64
from meshwright_interop.huggingface.restructure.library import whole_rows
from meshwright_interop.huggingface.restructure.marks import (
    Arguments,
    RunState,
    TargetReached,
    first_argument,
    with_first_argument,
)
from meshwright_interop.huggingface.restructure.places import at_places, own_arguments

IDS, HIDDEN, POSITIONS, DOCUMENT_POSITIONS = (
    "input_ids",
    "hidden_states",
    "position_ids",
    "document_position_ids",
)
"""Keys of the dict between layers. ``document_position_ids``:
positions that restart with each document of a row.
"""


class ModelSkeleton:
    """Transformers model with marks instead of its planned modules; no submodule of any layer,
    holds no weights.

    It keeps one copy of its constants (rotary frequencies) per device, in the dtype in which the
    model created them.
    """

    def __init__(self, model: nn.Module, state: RunState, description: str) -> None:
        self._copies = {torch.device("cpu"): (model, state)}
        self._cache: tuple[Any, list[Arguments]] = (None, [])
        self.description = description

    def __repr__(self) -> str:
        return f"Frame({self.description})"

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelSkeleton:
        return self

    def find_order(self) -> list[str]:
        """Find and store the order in which the forward calls the marks, by a run on two tokens,
        and return it.
        """
        model, state = self._at(torch.device("cpu"))
        state.positions, state.call_order, state.direct, state.last = {}, [], set(), None
        with torch.no_grad(), whole_rows():
            model(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False)
        state.positions, state.last = (
            {name: position for position, name in enumerate(state.call_order)},
            None,
        )
        return state.call_order

    @property
    def num_marks(self) -> int:
        """Number of planned modules of the model."""
        return len(self._copies[torch.device("cpu")][1].positions)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def call(
        self,
        position: int,
        value: Tensor,
        positions: Tensor,
        documents: bool,
        places: Tensor | None = None,
    ) -> Arguments:
        """Return the arguments with which the model calls its module at index ``position``.

        Args:
            position: index of the module's mark.
            value: output of the module before, (B, S, D), or (B, S/tp, D) under sequence
                parallelism; at position 0 the token ids (B, S). With ``places`` those of this
                rank's tokens.
            positions: (B, S), the whole sequence.
            documents: rows may hold several documents.
            places: (1 or B, S/cp), this rank's tokens under context parallelism.
        """
        _, state = self._at(value.device)
        if position in state.direct and position > 1:
            return with_first_argument(
                self._all_arguments(value, positions, documents, places)[position], value
            )
        if position > 1:
            arguments = self._run_to_mark(position, value, positions, documents, None)[-1]
            return own_arguments(arguments, places, positions.shape)
        # at position 1 inputs_embeds replaces the output of the model's embedding
        own = at_places(positions, places)
        arguments = self._run_to_mark(position, value, own, documents, value)[-1]
        if position == 0 or value.shape[1] == positions.shape[1]:
            return arguments
        # `value` is this rank's shard of the sequence, but masks are for the whole sequence
        hidden = first_argument(*arguments)
        return with_first_argument(
            self._all_arguments(value, positions, documents, places)[position], hidden
        )

    def _all_arguments(
        self, value: Tensor, positions: Tensor, documents: bool, places: Tensor | None
    ) -> list[Arguments]:
        """Return the arguments of every mark for these positions, with None for the hidden states.

        The last result is cached, by identity of ``positions`` (B, S) and ``places``, version,
        dtype and mode.
        """
        version = 0 if positions.is_inference() else positions._version
        key = (
            positions,
            places,
            version,
            value.dtype,
            documents,
            torch.is_inference_mode_enabled(),
        )
        cached_key, calls = self._cache
        is_cached = (
            cached_key is not None and cached_key[0] is positions and cached_key[1] is places
        )
        if not is_cached or cached_key[2:] != key[2:]:
            calls = self._run_to_mark(
                self.num_marks - 1, value, positions, documents, None, of_all=True
            )
            # inputs_embeds replaces the model's embedding, so that its mark is not called
            calls = [((), {})] * (self.num_marks - len(calls)) + calls
            calls = [with_first_argument(call, None) if any(call) else call for call in calls]
            self._cache = (key, [own_arguments(call, places, positions.shape) for call in calls])
            calls = self._cache[1]
        return calls

    def _run_to_mark(
        self,
        position: int,
        value: Tensor,
        positions: Tensor,
        documents: bool,
        first: Tensor | None,
        of_all: bool = False,
    ) -> list[Arguments]:
        """Run the model up to the mark at ``position``,
        and return the arguments of each mark called.

        ``value`` is the output of the mark before. With ``of_all`` the hidden states are
        placeholder zeros instead, and ``value`` only gives dtype and device.
        """
        try:
            self._run(position, None if of_all else value, positions, documents, first, value)
        except TargetReached as reached:
            return reached.calls
        raise AssertionError(f"{self!r} ended before mark {position}")

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def end(self, value: Tensor, positions: Tensor, documents: bool) -> Tensor:
        """Run the computations after the last module, whose output is ``value``,
        and return the logits.

        ``value`` and logits: (B, S, V), or (B, S, V/tp) if the head is sharded. ``positions``: (B,
        S).
        """
        logits = self._run(self.num_marks, value, positions, documents, None, value).logits
        assert isinstance(logits, Tensor)
        return logits

    def _run(
        self,
        target: int,
        substitute: Tensor | None,
        positions: Tensor,
        documents: bool,
        first: Tensor | None,
        like: Tensor,
    ) -> Any:
        """Run the model's forward up to the mark at ``target``.

        Args:
            target: index of the mark that ends the run.
            substitute: output of the mark before ``target``; None: its input.
            positions: (B, S).
            documents: rows may hold several documents.
            first: input of the model, token ids (B, S) or embeddings (B, S, D). None: zeros (B, S,
                D) without memory of their own, of the whole sequence also if ``substitute`` is a
                shard of it.
            like: tensor that gives the dtype and device of these zeros.
        """
        model, state = self._at(like.device)
        if first is None:
            first = like.new_zeros(()).expand(*positions.shape, state.width)
        key = "inputs_embeds" if first.is_floating_point() else IDS
        state.reset(target, substitute)
        try:
            with whole_rows(not documents):
                return model(
                    **{key: first},
                    position_ids=positions if documents else positions[:1],
                    use_cache=False,
                )
        finally:
            state.reset(-1, None)

    def copy_on(self, device: torch.device) -> nn.Module:
        """Return the model with marks whose constants are on ``device``."""
        return self._at(device)[0]

    def _at(self, device: torch.device) -> tuple[nn.Module, RunState]:
        if device not in self._copies:
            whole = self._copies[torch.device("cpu")]
            tensors = [
                each
                for m in whole[0].modules()
                for each in (*m._buffers.values(), *vars(m).values())
            ]
            # constants are replaced by those on the device, never copied: under fake tensors they
            # cannot be
            model, state = copy.deepcopy(
                whole, {id(each): each for each in tensors if isinstance(each, Tensor)}
            )
            self._copies[device] = (model.to(device), state)
        return self._copies[device]


def positions_of(starts: Tensor) -> Tensor:
    """Return the position of each token in its document: starts (B, S) bool -> (B, S) int64."""
    places = torch.arange(starts.shape[1], device=starts.device).expand_as(starts)
    return places - places.masked_fill(~starts, 0).cummax(1).values


class PipelineLayer(nn.Module):
    """One layer of the Sequential: consecutive planned modules,
    each with the model's computations in front of it.

    Input: token ids (B, S); or a dict of ``input_ids`` and ``position_ids``, or of ``tokens`` and
        ``starts`` (B, S)
    bool, True where a document begins; or the dict of the layer before. Output: a dict of hidden
    states (B, S, D) and positions (B, S). The last layer returns logits (B, S, V), or this rank's
    shard (B, S, V/tp). Under sequence parallelism hidden states are (B, S/tp, D), this rank's
    shard, and positions are whole. Under context parallelism the ids of the first layer are whole,
    and ``places`` are this rank's tokens: hidden states are (B, S/cp, D).
    """

    def __init__(
        self,
        frame: ModelSkeleton,
        first: int,
        names: Sequence[str],
        modules: Mapping[str, nn.Module],
    ) -> None:
        super().__init__()
        self.frame = frame
        self.first = first
        self.names = tuple(names)
        self.one_document_reason = ""
        """Reason why a row must hold one document; empty if it may hold several."""
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, value: Any, places: Tensor | None = None) -> Any:
        value = {IDS: value} if isinstance(value, Tensor) else value
        if "starts" in value:  # data.document_boundaries
            value = {IDS: value["tokens"], POSITIONS: positions_of(value["starts"])}
        dtype = (value[HIDDEN] if HIDDEN in value else next(self.parameters())).dtype
        with keep_float64(dtype), constants_on(next(iter(value.values())).device):
            return (
                self._run_modules(value, None)
                if places is None
                else self._run_places(value, places)
            )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _run_places(self, value: dict[str, Tensor], places: Tensor) -> Any:
        """Run the modules on this rank's tokens; train.compile has no effect on them."""
        device = next(iter(value.values())).device
        with registered([*self.frame.copy_on(device).modules(), *self.modules()]):
            return self._run_modules(value, places)

    def _run_modules(self, value: dict[str, Tensor], places: Tensor | None) -> Any:
        hidden = value[IDS] if IDS in value else value[HIDDEN]
        documents = DOCUMENT_POSITIONS in value or (IDS in value and POSITIONS in value)
        if documents and self.one_document_reason:
            raise ModelError(
                "MW-INTEROP-140",
                f"{self.frame.description.split()[0]}: {self.one_document_reason}, so that tokens"
                " of one document would reach the next in its row: give samples without positions,"
                " and set data.document_boundaries = false",
            )
        positions = value.get(DOCUMENT_POSITIONS, value.get(POSITIONS))
        if positions is None:
            positions = torch.arange(hidden.shape[1], device=hidden.device).repeat(len(hidden), 1)
        if IDS in value:
            hidden = at_places(hidden, places)
        for position, name in enumerate(self.names, self.first):
            args, kwargs = self.frame.call(position, hidden, positions, documents, places)
            module = self.get_submodule(name)
            hidden = module(*args, **kwargs)
            if not isinstance(hidden, Tensor):
                raise ModelError(
                    "MW-INTEROP-064",
                    f"{name} ({type(module).__name__}) returns a {type(hidden).__name__}, but a"
                    " pipeline stage must send one tensor of hidden states",
                )
        if self.first + len(self.names) == self.frame.num_marks:
            return self.frame.end(hidden, positions, documents)
        return {HIDDEN: hidden, DOCUMENT_POSITIONS if documents else POSITIONS: positions}
