"""Types of the numbers in the configuration, with their bounds."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

# NOTE [bounds of whole numbers]: the manifest of a checkpoint holds whole numbers below 2**63
# (checkpoint/manifest). Every whole number here has an upper bound below that, and so has every
# product that a checkpoint records: train.steps x batch.global_batch is at most 10**18. A new key
# of whole numbers takes one of these types.
MAX_COUNT, MAX_LENGTH = 10**6, 10**9
Count = Annotated[int, Field(gt=0, le=MAX_COUNT)]
"""A number of ranks, micro-batches or samples; bounded, because they are enumerated one by one."""
Length = Annotated[int, Field(gt=0, le=MAX_LENGTH)]
"""A number of steps, samples or tokens, at least 1."""
Steps = Annotated[int, Field(ge=0, le=10**9)]
"""A number of steps, 0 allowed."""
Int64 = Annotated[int, Field(ge=0, lt=2**63)]
"""A whole number that TOML, a manifest and an int64 tensor can hold."""
Share = Annotated[float, Field(ge=0, lt=1)]
