"""An own model, loss, optimizer, schedule, parameter groups, EMA and early stop on 8 ranks:
python own_run.py
"""

import argparse
import optparse
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import meshwright


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Conv1d(width, width, 4, groups=width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):  # (batch, sequence, width)
        past = F.pad(self.norm(x).transpose(1, 2), (3, 0))
        return x + self.down(F.gelu(self.up(self.mix(past).transpose(1, 2))))


def model(width=32, depth=4):
    layers = nn.Sequential(
        nn.Embedding(256, width), *(Block(width) for _ in range(depth)), nn.Linear(width, 256)
    )
    layers.sharding_plan, layers.loss = {"*.up": "column", "*.down": "row"}, smoothed
    return layers


def smoothed(logits, labels):  # loss per label
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", label_smoothing=0.1)


def data(split, length=32):
    text = Path((argparse if split == "train" else optparse).__file__).read_bytes()
    ids = torch.tensor(list(text[: len(text) // (length + 1) * (length + 1)])).view(-1, length + 1)
    return [(row[:-1], row[1:]) for row in ids]


class Lion(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in [p for p in group["params"] if p.grad is not None]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(torch.lerp(p.grad, momentum, 0.9).sign_(), alpha=-group["lr"])
                momentum.lerp_(p.grad, 0.01)


def lion(groups):
    return Lion(groups, {})


def inverse_root(step, num_steps, warmup=10):
    return min((step + 1) / warmup, (warmup / (step + 1)) ** 0.5)


class Ema(meshwright.Observer):
    def setup(self, parts):
        self.average = parts.add_state("ema")  # saved, and resumed on any layout

    def after_step(self, parts, event):
        for average, shard in zip(self.average, parts.optimizer.shards, strict=True):
            average.lerp_(shard.weights, 0.01)


class EarlyStop(meshwright.Observer):
    state = {"best": 1e9, "waited": 0}

    def after_step(self, parts, event):
        if (loss := event.validation_loss) is not None:
            best = min(loss, self.state["best"])
            self.state = {"best": best, "waited": 0 if loss == best else self.state["waited"] + 1}
            if self.state["waited"] >= 3:
                parts.request_stop(f"no better validation loss than {best:.4f}")

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def train(config):
    meshwright.run_training(config, [Ema(), EarlyStop()])


if __name__ == "__main__":
    meshwright.spawn(train, meshwright.load_config("own_run.toml"))
