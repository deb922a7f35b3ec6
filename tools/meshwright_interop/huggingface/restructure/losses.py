"""Losses that a configuration of transformers asks for beside that of the tokens.

    output_router_logits, router_aux_loss_coef   balance of the experts: Switch's loss of each layer, a mean over layers
    z_loss_coefficient                           size of the logits (Bamba): ``z_loss`` of the layers

transformers computes one balance loss over the pooled tokens of all layers. Its pieces lie on
different pipeline stages, so that here each layer has its own: with one layer they are equal. The
scores are the softmax of the logits that transformers records, and the experts of a token are
those with the highest scores, as there. Losses, counts and their names are those of meshwright's
own mixtures (``meshwright_models/expert_balance.py``).

Shapes: N tokens of a micro-batch on this rank, E experts, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.errors import ModelError
from meshwright_interop.huggingface.files import CONFIG
from meshwright_interop.huggingface.restructure.bounds import numbers_in
from meshwright_models.expert_balance import Balance, add_loss, count_tokens, loss_sum
from meshwright_models.router import entropy_sum, unchanged

OF_ROUTERS = "router_aux_loss_coef"
"""Factor of the balance loss, which transformers adds if ``output_router_logits`` is set."""
OTHER_NAMES = ("aux_loss_coef", "moe_loss_weight")
"""Names of the factor in architectures whose routers are of another form."""
OF_LOGITS = "z_loss_coefficient"


class Losses(NamedTuple):
    """Factors of the losses beside that of the tokens; 0: none."""

    routers: float = 0.0
    logits: float = 0.0


def losses_of(config: Any, overrides: Mapping[str, Any], path: Path) -> Losses:
    """Return the losses that a configuration asks for.

    Raises:
        ModelError: a factor is negative, or of routers of another form.
    """
    text = config.get_text_config()
    found = {names[-1]: value for names, value in numbers_in(text.to_dict(), ()) if value}
    has_routers = bool(getattr(text, "output_router_logits", False))
    for name in (OF_ROUTERS, OF_LOGITS):
        if found.get(name, 0) < 0 and (has_routers or name == OF_LOGITS):
            raise ModelError(
                "MW-INTEROP-154",
                f"{_where(name, overrides, path)} = {found[name]} would reward what the loss is to"
                " prevent: a number from 0 up is needed",
            )
    other = next((name for name in OTHER_NAMES if name in found), None)
    if has_routers and other is not None:
        raise _refused(_where("output_router_logits", overrides, path), other, found[other])
    return Losses(found.get(OF_ROUTERS, 0.0) if has_routers else 0.0, found.get(OF_LOGITS, 0.0))


def _where(name: str, overrides: Mapping[str, Any], path: Path) -> str:
    """Return the place of a key: ``model.options``, or the file."""
    return f"model.options.{name}" if name in overrides else f"{path / CONFIG}: {name}"


def _refused(where: str, name: str, factor: float) -> ModelError:
    return ModelError(
        "MW-INTEROP-148",
        f"{where} = true asks for the loss of the routers beside that of the tokens ({name} ="
        f" {factor}), which is not computed for routers of this form: set"
        " model.options.output_router_logits = false to train without it",
    )


class RouterBalance(nn.Module):
    """Balance loss of one router of transformers, and the counts of its load.

    The framework sets ``gradient_scale`` and extends ``sum_tokens``, as of meshwright's own
    routers.
    """

    counts: Tensor
    entropy: Tensor
    step_sums = ("counts", "entropy")
    couples_samples = True

    def __init__(self, factor: float, num_experts: int, top_k: int, index: int) -> None:
        super().__init__()
        self.balance, self.top_k = Balance(batch_loss=factor), top_k
        self.index = index
        """Place of the logits in the router's output."""
        self.gradient_scale = 1.0
        self.sum_tokens: Callable[[Tensor], Tensor] = unchanged
        for name, zeros in (
            ("counts", torch.zeros(num_experts, dtype=torch.int64, device="cpu")),
            ("entropy", torch.zeros(2, dtype=torch.float64, device="cpu")),
        ):
            self.register_buffer(name, zeros, persistent=False)

    def forward(self, outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return a router's output, to whose weights the loss is attached, and count its choice.

        ``outputs``: logits (N, E) at ``index``, weights of a token's experts, ids (N, k).
        """
        place, ids = self._parts(outputs)
        logits = outputs[self.index]
        scores = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        with torch.no_grad():
            self.counts += count_tokens(ids.unsqueeze(0), len(self.counts))[0]
            self.entropy += entropy_sum(scores)
            highest = scores.topk(self.top_k, dim=-1).indices
        weights = outputs[place]
        if not weights.requires_grad:
            return outputs
        one = [each.unsqueeze(0) for each in (logits, scores, highest)]  # one sample of all tokens
        added = loss_sum(self.balance, one[0], one[1], one[2], self.sum_tokens)
        weights = add_loss(weights, added, lambda: self.gradient_scale)
        return (*outputs[:place], weights, *outputs[place + 1 :])

    def _parts(self, outputs: tuple[Any, ...]) -> tuple[int, Tensor]:
        """Return the place of the weights in a router's output, and its ids (N, k).

        Raises:
            ModelError: the output has another form.
        """
        tensors = [place for place, each in enumerate(outputs) if isinstance(each, Tensor)]
        others = [place for place in tensors if place != self.index]
        weights = [place for place in others if outputs[place].is_floating_point()]
        ids = [outputs[place] for place in others if not outputs[place].is_floating_point()]
        is_known = self.index in tensors and outputs[self.index].shape[1:] == self.counts.shape
        if not is_known or len(weights) != 1 or len(ids) != 1 or ids[0].shape[-1] != self.top_k:
            shapes = [list(each.shape) for each in outputs if isinstance(each, Tensor)]
            raise ModelError(
                "MW-INTEROP-155",
                f"a router returns tensors of the shapes {shapes}, and for its balance loss logits,"
                " weights and ids are needed: set model.options.output_router_logits = false to"
                " train without it",
            )
        return weights[0], ids[0]

    def end_step(self) -> None:
        """Reset the counts."""
        for name in self.step_sums:
            self.get_buffer(name).zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RouterBalance:
        """Move with the module between devices, but keep the dtype of the counts."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.entropy = self.entropy.double()
        return self


def recorded_index(model: Any, router: nn.Module) -> int | None:
    """Return the place of the logits in a router's output, as transformers records them;
    None: it does not.
    """
    for module in model.modules():
        recorders = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits", ())
        for recorder in recorders if isinstance(recorders, list | tuple) else (recorders,):
            if getattr(recorder, "target_class", None) is type(router):
                return int(recorder.index)
    return None


def balance_routers(
    model: Any, routers: Mapping[str, Any], num_mixtures: int, factor: float, place: str
) -> list[str]:
    """Give each router a balance loss of ``factor`` / number of routers, and return their names.

    Raises:
        ModelError: transformers has no such loss for the model, or a mixture has a router whose
            logits it does not record.
    """
    if not factor:
        return []
    indices = {name: recorded_index(model, router) for name, router in routers.items()}
    is_whole = len(indices) == num_mixtures and None not in indices.values()
    if not hasattr(model, OF_ROUTERS) or not is_whole:
        raise _refused(f"{place}: output_router_logits", OF_ROUTERS, factor)
    for name, router in routers.items():
        index: Any = indices[name]
        sizes = router.routing
        share = factor / len(routers)
        router.balance = RouterBalance(share, sizes.num_experts, sizes.top_k, index)
    return [f"{name}.balance" for name in routers]
