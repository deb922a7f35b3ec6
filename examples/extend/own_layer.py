"""A layer of one's own with a sharding rule: a block-diagonal feed-forward network,
its groups split over tp.
"""

import torch
from torch import nn

import meshwright


class GroupedMLP(nn.Module):
    """Each group mixes its own features; (batch, sequence, width) -> (batch, sequence, width)."""

    def __init__(self, width, num_groups):
        super().__init__()
        self.num_groups = num_groups
        self.up = nn.Parameter(torch.empty(num_groups, width, 2 * width // num_groups))
        self.down = nn.Parameter(torch.empty(num_groups, 2 * width // num_groups, width))
        self.drop = nn.Dropout(0.1)
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.up, std=0.05)
        nn.init.normal_(self.down, std=0.05)

    def forward(self, x):
        hidden = torch.einsum("bsw,gwf->bgsf", x, self.up).relu() / self.num_groups**0.5
        return torch.einsum("bgsf,gfw->bsw", self.drop(hidden), self.down)


def split_groups(layer, tp_rank, tp):
    """Give a rank its part of the groups; the ranks' outputs add up to the layer's."""
    return meshwright.SplitLayer(
        {"up": 0, "down": 0}, input="whole", output="sum", dropout_dims={"drop": 1}
    )


class Block(nn.Module):
    def __init__(self, width, num_groups):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(width), GroupedMLP(width, num_groups)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def model(width=32, depth=4, num_groups=4):
    layers = nn.Sequential(
        nn.Embedding(256, width), *(Block(width, num_groups) for _ in range(depth))
    )
    layers.append(nn.Linear(width, 256))
    layers.sharding_plan = {"0": "vocab", "*.mlp": split_groups, str(depth + 1): "vocab"}
    return layers
