"""megatron-core is imported while the tests are collected:
ranks are forked afterwards and need not import it each.
"""

from __future__ import annotations

import torch

from meshwright.tensor_parallel import megatron

megatron.load_mappings(torch.device("cpu"))
