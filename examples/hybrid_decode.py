"""A hybrid decode step: three gated-delta-net layers and one attention layer in one storage.

This is how vLLM lays out Qwen3-Next and its relatives. The four layers share one tensor: a page
holds either a block of keys and values (bfloat16), or the convolution state (bfloat16) and the
recurrent state (float32) of one request in one linear-attention layer. Every byte of a state is
thus also a byte of the key-value cache, in another dtype; the allocator gives each page to one
layer at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from aliasstorage import Window


@dataclass(frozen=True)
class Geometry:
    """Sizes of a hybrid model's layers, on one device.

    The defaults are a small model with vLLM's page arithmetic: attention pages hold as many
    tokens as it takes to make them at least as large as a linear-attention state.
    """

    key_heads: int = 2
    value_heads: int = 4
    state_dim: int = 32
    kernel: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    hidden: int = 64
    block_alignment: int = 16  # tokens

    @property
    def conv_shape(self) -> tuple[int, int]:
        channels = 2 * self.state_dim * self.key_heads + self.state_dim * self.value_heads
        return (self.kernel - 1, channels)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return (self.value_heads, self.state_dim, self.state_dim)

    @property
    def conv_bytes(self) -> int:
        return 2 * prod(self.conv_shape)

    @property
    def block_tokens(self) -> int:
        token = 2 * 2 * self.kv_heads * self.head_dim
        state = self.conv_bytes + 4 * prod(self.state_shape)
        unit = self.block_alignment * token
        return self.block_alignment * -(-state // unit)

    @property
    def page_bytes(self) -> int:
        return self.block_tokens * 2 * 2 * self.kv_heads * self.head_dim

    def windows(self, pages: int) -> dict[str, Window]:
        """Return the windows of one storage of ``pages`` pages."""
        page = self.page_bytes
        kv = (pages, 2, self.block_tokens, self.kv_heads, self.head_dim)
        taps, channels = self.conv_shape
        heads, dk, dv = self.state_shape
        return {
            "kv": Window(torch.bfloat16, kv),
            "conv": Window(torch.bfloat16, (pages, taps, channels), (page // 2, channels, 1), 0),
            "ssm": Window(
                torch.float32,
                (pages, heads, dk, dv),
                (page // 4, dk * dv, dv, 1),
                self.conv_bytes,
            ),
        }


def gated_delta_net(
    geometry: Geometry, x: Any, conv: Any, ssm: Any, slots: Any, weights: dict[str, Any]
) -> Any:
    """One decode step of a linear-attention layer: conv and recurrent states are updated."""
    batch, dk = x.shape[0], geometry.state_dim
    projected = x @ weights["in"]
    window = torch.cat([conv[slots], projected.to(conv.dtype).unsqueeze(1)], dim=1)
    conv[slots] = window[:, 1:]
    mixed = torch.nn.functional.silu((window.float() * weights["conv"]).sum(1))
    keys = geometry.key_heads * dk
    q, k, v = mixed.split([keys, keys, geometry.value_heads * dk], dim=-1)
    repeat = geometry.value_heads // geometry.key_heads
    q = q.view(batch, geometry.key_heads, dk).repeat_interleave(repeat, 1)
    k = torch.nn.functional.normalize(k.view(batch, geometry.key_heads, dk), dim=-1)
    k = k.repeat_interleave(repeat, 1)
    v = v.view(batch, geometry.value_heads, dk)
    decay = torch.sigmoid(x @ weights["decay"]).view(batch, -1, 1, 1)
    beta = torch.sigmoid(x @ weights["beta"]).view(batch, -1, 1)
    state = ssm[slots] * decay
    correction = (v - torch.einsum("bhkv,bhk->bhv", state, k)) * beta
    state = state + k.unsqueeze(-1) * correction.unsqueeze(-2)
    ssm[slots] = state
    out = torch.einsum("bhkv,bhk->bhv", state, q) * dk**-0.5
    return x + out.reshape(batch, -1) @ weights["out"]


def attention(
    geometry: Geometry,
    x: Any,
    kv_cache: Any,
    block_table: Any,
    positions: Any,
    weights: dict[str, Any],
) -> Any:
    """One decode step of a softmax-attention layer over a paged cache."""
    batch, heads, dim = x.shape[0], geometry.kv_heads, geometry.head_dim
    tokens = geometry.block_tokens
    q, k, v = (x @ weights["qkv"]).view(batch, 3, heads, dim).unbind(1)
    block = block_table.gather(1, (positions // tokens).unsqueeze(1)).squeeze(1)
    kv_cache[block, 0, positions % tokens] = k.to(kv_cache.dtype)
    kv_cache[block, 1, positions % tokens] = v.to(kv_cache.dtype)
    keys, values = kv_cache[block_table].float().unbind(2)
    keys, values = keys.flatten(1, 2), values.flatten(1, 2)
    scores = torch.einsum("bhd,bthd->bht", q, keys) * dim**-0.5
    seen = torch.arange(keys.shape[1], device=x.device) <= positions.unsqueeze(1)
    scores = scores.masked_fill(~seen.unsqueeze(1), float("-inf"))
    out = torch.einsum("bht,bthd->bhd", scores.softmax(-1), values)
    return x + out.reshape(batch, -1) @ weights["out"]


@dataclass
class HybridStep:
    """The weights of four layers, and which pages belong to which layer."""

    geometry: Geometry
    linear: list[dict[str, Any]]
    softmax: dict[str, Any]
    slots: list[Any]
    block_table: Any

    def __call__(self, caches: list[Any], x: Any, positions: Any) -> Any:
        """Run one decode step; ``caches`` holds (conv, ssm) three times, then kv."""
        *states, kv = caches
        for (conv, ssm), slots, weights in zip(states, self.slots, self.linear, strict=True):
            x = gated_delta_net(self.geometry, x, conv, ssm, slots, weights)
        return attention(self.geometry, x, kv, self.block_table, positions, self.softmax)


def make_step(
    geometry: Geometry, pages: int, batch: int = 4, blocks: int = 2, layers: int = 3, seed: int = 0
) -> HybridStep:
    """Return a step with random weights and a random assignment of pages."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Any:
        return torch.randn(*size, generator=generator) * size[0] ** -0.5

    taps, channels = geometry.conv_shape
    values = geometry.value_heads * geometry.state_dim
    row = geometry.kv_heads * geometry.head_dim
    linear = [
        {
            "in": normal(geometry.hidden, channels),
            "conv": normal(taps + 1, channels),
            "decay": normal(geometry.hidden, geometry.value_heads),
            "beta": normal(geometry.hidden, geometry.value_heads),
            "out": normal(values, geometry.hidden),
        }
        for _ in range(layers)
    ]
    softmax = {"qkv": normal(geometry.hidden, 3 * row), "out": normal(row, geometry.hidden)}
    order = torch.randperm(pages, generator=generator)
    slots = [order[i * batch : (i + 1) * batch].clone() for i in range(layers)]
    table = order[layers * batch : (layers + blocks) * batch].view(batch, blocks).clone()
    return HybridStep(geometry, linear, softmax, slots, table)


def caches_of(
    views: dict[str, Any], layers: int = 3, copy: Callable[[Any], Any] = lambda view: view
) -> list[Any]:
    """Return the step's caches from the views of one storage."""
    linear = [(copy(views["conv"]), copy(views["ssm"])) for _ in range(layers)]
    return [*linear, copy(views["kv"])]
