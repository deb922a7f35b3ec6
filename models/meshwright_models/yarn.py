"""YaRN: rotary positions of a model that was pre-trained on shorter sequences (Peng et al. 2023,
arXiv:2309.00071), with the options of transformers' ``rope_type = "yarn"``.

A pair of features that turns often within the original length keeps its frequency. A slow one is
slowed by ``factor``. Between the two a ramp over the pairs interpolates::

    pair        0 ............ first ............ last ............ r/2 - 1
    frequency     unchanged         interpolated        / factor

``first`` is the pair with ``beta_fast`` turns, and ``last`` that with ``beta_slow``. Besides, the
cosines and sines are multiplied by ``rotation_scale``, and the scores of a latent attention by
``score_scale`` (DeepSeek-V2 and -V3, Kimi-K2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from meshwright_models.option_tables import read_table


class YarnOptions(NamedTuple):
    """Scaling of rotary positions: the table ``model.options.rope_yarn``."""

    factor: float
    """Length of the sequences over ``original_length``."""
    original_length: int
    """Tokens of a sequence in the original pre-training."""
    beta_fast: float = 32.0
    """Turns within the original length from which on a pair is unchanged."""
    beta_slow: float = 1.0
    """Turns within the original length up to which a pair is slowed by ``factor``."""
    mscale: float | None = None
    mscale_all_dim: float | None = None
    """Weights of log(factor), see ``rotation_scale`` and ``score_scale``. None counts as 0."""
    attention_factor: float | None = None
    """Factor on the cosines and sines. None: that of ``factor`` and the two weights."""
    truncate: bool = True
    """The ramp begins and ends at whole pairs."""

    def check(self) -> None:
        """Raise ValueError for all values that are out of range, in one message."""
        problems = [
            f"{name}={getattr(self, name)} must be positive"
            for name in ("original_length", "beta_slow", "attention_factor")
            if getattr(self, name) is not None and getattr(self, name) <= 0
        ]
        problems += [
            f"{name}={getattr(self, name)} must not be negative"
            for name in ("mscale", "mscale_all_dim")
            if (getattr(self, name) or 0) < 0
        ]
        if self.factor < 1:
            problems.append(f"factor={self.factor} must be at least 1")
        if self.beta_fast < self.beta_slow:
            problems.append(
                f"beta_fast={self.beta_fast} must not be below beta_slow={self.beta_slow}"
            )
        if problems:
            raise ValueError(f"rope_yarn: {'; '.join(problems)}")

    @property
    def rotation_scale(self) -> float:
        """Factor on the cosines and sines: on queries and keys, and so twice on the scores."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._scale(self.mscale) / self._scale(self.mscale_all_dim)
        return self._scale(1.0)

    @property
    def score_scale(self) -> float:
        """Factor on the scores of a latent attention, whose unrotated features it scales too."""
        return self._scale(self.mscale_all_dim or 0.0) ** 2

    def _scale(self, weight: float) -> float:
        return 1 + 0.1 * weight * math.log(self.factor)

    def frequencies(self, features: int, theta: float) -> list[float]:
        """Return radians per token for the pairs of ``features`` rotated features.

        Raises:
            ValueError: ``theta`` is not above 1: all pairs would turn equally often.
        """
        if theta <= 1:
            raise ValueError(f"rope_yarn with rope_theta={theta}, which must be above 1")
        first, last = self._ramp(features, theta)
        frequencies = []
        for pair in range(features // 2):
            slowed_share = min(max((pair - first) / (last - first), 0.0), 1.0)
            frequency = theta ** (-2 * pair / features)
            frequencies.append(frequency * (1 - slowed_share + slowed_share / self.factor))
        return frequencies

    def _ramp(self, features: int, theta: float) -> tuple[float, float]:
        """Return the pairs at which the ramp begins and ends, in the order of transformers."""
        first, last = (
            self._pair(turns, features, theta) for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, features - 1)
        return first, last if last != first else last + 0.001  # one step, not a division by zero

    def _pair(self, turns: float, features: int, theta: float) -> float:
        """Return the pair with so many turns within the original length, a fraction between two."""
        radians = math.log(self.original_length) - math.log(turns) - math.log(2 * math.pi)
        return features * radians / (2 * math.log(theta))


def yarn_of(options: Mapping[str, Any]) -> YarnOptions | None:
    """Return the scaling that a builder's table ``rope_yarn`` gives; None without one, or for
    "none" of a command line.

    Raises:
        ValueError: a value is missing, unknown, of another type or out of range, or another scaling
            is set too.
    """
    given = options["rope_yarn"]
    if given is None or given == "none":
        return None
    yarn = read_table("rope_yarn", given, YarnOptions)
    yarn.check()
    others = [
        f"{name}={options[name]}"
        for name in ("rope_scaling_factor", "rope_interpolation")
        if options.get(name, 1) != 1
    ]
    if others:
        raise ValueError(
            f"rope_yarn with {' and '.join(others)}: positions have one scaling; leave the other out"
        )
    return yarn
