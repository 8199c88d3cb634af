"""Modules of the kinds that people offload, small and random. Nothing here knows headrace."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 32


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random(*shape: int, seed: int = 99) -> torch.Tensor:
    return torch.randn(shape, generator=generator(seed))


def randomized(module: nn.Module, seed: int = 0) -> Any:
    """The module for inference, every parameter and every floating buffer other than in any other place."""
    dice = generator(seed)
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=dice) / 4 + 0.05)
    return module.eval().requires_grad_(False)


class Layer(nn.Module):
    """A residual layer; `inside` runs in the middle of it."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.inside: Callable[[nn.Module], None] | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(self.up(hidden))
        if self.inside is not None:
            self.inside(self)
        return hidden + self.down(inner)


class Stack(nn.Module):
    def __init__(self, count: int = 4, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(width) for _ in range(count)])
        self.norm = nn.LayerNorm(width)

    def forward(self, hidden: torch.Tensor, order: list[int] | None = None) -> torch.Tensor:
        for index in range(len(self.layers)) if order is None else order:
            hidden = self.layers[index](hidden)
        return self.norm(hidden)


def stack(count: int = 4, width: int = WIDTH, seed: int = 0) -> Stack:
    made: Stack = randomized(Stack(count, width), seed)
    return made


# --- models of other libraries' kinds -------------------------------------------------------------------------------


class VisionTransformer(nn.Module):
    """As timm and torchvision write it: the blocks are a Sequential, beside a stem and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, WIDTH, 4, 4), nn.Flatten(2))
        self.positions = nn.Parameter(torch.zeros(1, 16, WIDTH))
        self.blocks = nn.Sequential(*[nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True) for _ in range(3)])
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, *, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.blocks(self.stem(pixels).transpose(1, 2) + self.positions)
        return {"logits": self.head(hidden.mean(1)), "hidden": hidden}


@dataclass
class TwoStreams:
    image: torch.Tensor
    text: torch.Tensor


class JointBlock(nn.Module):
    """Two streams, modulated by the time (adaLN), joined in one attention; everything comes by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.modulation = nn.Linear(WIDTH, 4 * WIDTH)
        self.image_qkv, self.text_qkv = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, *, image: torch.Tensor, text: torch.Tensor, time: torch.Tensor) -> TwoStreams:
        shift_i, scale_i, shift_t, scale_t = self.modulation(F.silu(time)).chunk(4, dim=-1)
        one = self.image_qkv(F.layer_norm(image, (WIDTH,)) * (1 + scale_i[:, None]) + shift_i[:, None])
        two = self.text_qkv(F.layer_norm(text, (WIDTH,)) * (1 + scale_t[:, None]) + shift_t[:, None])
        q, k, v = torch.cat([one, two], dim=1).chunk(3, dim=-1)
        joint = F.scaled_dot_product_attention(q, k, v) * self.scale
        return TwoStreams(image + joint[:, : image.shape[1]], text + joint[:, image.shape[1] :])


class DiffusionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.joint = nn.ModuleList([JointBlock() for _ in range(3)])
        self.single = nn.ModuleList([Layer() for _ in range(3)])

    def forward(self, *, image: torch.Tensor, text: torch.Tensor, time: torch.Tensor) -> TwoStreams:
        streams, embedded = TwoStreams(image, text), self.time(time[:, None])
        for block in self.joint:
            streams = block(image=streams.image, text=streams.text, time=embedded)
        image = streams.image
        for layer in self.single:
            image = layer(image)
        return TwoStreams(image, streams.text)


class EncoderDecoder(nn.Module):
    """Two stacks of different layers; a layer of the second gives a tuple with None in it."""

    class DecoderLayer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
            self.cross = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

        def forward(self, hidden: torch.Tensor, memory: torch.Tensor) -> tuple[torch.Tensor, None]:
            hidden = hidden + self.own(hidden, hidden, hidden, need_weights=False)[0]
            return hidden + self.cross(hidden, memory, memory, need_weights=False)[0], None

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, WIDTH)
        self.encoder = nn.ModuleList([Layer() for _ in range(3)])
        self.decoder = nn.ModuleList([self.DecoderLayer() for _ in range(2)])
        self.head = nn.Linear(WIDTH, 50, bias=False)
        self.head.weight = self.table.weight

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        memory, hidden = self.table(source), self.table(target)
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            hidden, nothing = layer(hidden, memory=memory)
            assert nothing is None
        return self.head(hidden)


class PairsInLists(nn.Module):
    """Lists in a list: nobody calls the inner ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleList([Layer(), nn.LayerNorm(WIDTH)]) for _ in range(3)])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for mix, norm in self.layers:
            hidden = norm(mix(hidden))
        return hidden


class Recurrent(nn.Module):
    """An LSTM keeps its weights in a list of its own beside its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(2)])
        self.more = nn.ModuleList([Layer() for _ in range(3)])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden, _ = layer(hidden)
        for layer in self.more:
            hidden = layer(hidden)
        return hidden


class Residual(nn.Module):
    """A convolutional network in stages, with running statistics in buffers."""

    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)

        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            return pixels + F.relu(self.norm(self.convolution(pixels)))

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(self.Unit(), self.Unit())
        self.second = nn.Sequential(self.Unit(), self.Unit(), nn.Flatten())

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(pixels))


def kinds() -> dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]]:
    """Name to what builds the module and the arguments of one call."""
    plain = {"hidden": random(2, 5, WIDTH)}
    pixels, both = random(2, 3, 16, 16), {"image": random(2, 6, WIDTH), "text": random(2, 4, WIDTH)}
    tokens = {"source": torch.arange(12).view(2, 6), "target": torch.arange(8).view(2, 4)}
    rows = nn.Sequential, [Layer, nn.Tanh, Layer, Layer]
    return {
        "stack": (Stack, plain),
        "vision": (VisionTransformer, {"pixels": pixels}),
        "diffusion": (DiffusionTransformer, {**both, "time": torch.tensor([0.25, 0.5])}),
        "encoder-decoder": (EncoderDecoder, tokens),
        "lists in lists": (PairsInLists, plain),
        "recurrent": (Recurrent, plain),
        "residual": (Residual, {"pixels": random(2, 8, 6, 6)}),
        "sequential": (lambda: rows[0](*[make() for make in rows[1]]), {"input": random(2, 5, WIDTH)}),
        "backbone and head": (
            lambda: nn.Sequential(Stack(), nn.Linear(WIDTH, WIDTH)),
            {"input": random(2, 5, WIDTH)},
        ),
    }


def same(one: Any, other: Any) -> bool:
    """Equal, bit for bit, whatever it is wrapped in."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if hasattr(one, "__dict__"):
        return type(one) is type(other) and same(vars(one), vars(other))
    return bool(one == other)


def snapshot(module: nn.Module) -> dict[str, Any]:
    """All that offloading could change and must give back: identities, contents, forwards, classes, attributes."""
    return {
        "parameters": {name: (id(p), p.data.clone(), p.requires_grad) for name, p in _every_parameter(module)},
        "buffers": {name: (id(b), b.clone()) for name, b in module.named_buffers(remove_duplicate=False)},
        "classes": {name: type(m) for name, m in module.named_modules()},
        "own": {name: sorted(vars(m)) for name, m in module.named_modules()},
        "hooks": {
            name: (len(m._state_dict_pre_hooks), len(m._load_state_dict_pre_hooks))
            for name, m in module.named_modules()
        },
    }


def _every_parameter(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(module.named_parameters(remove_duplicate=False))


def twin(module: nn.Module) -> Any:
    return copy.deepcopy(module)
