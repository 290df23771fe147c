"""The sizes of a hybrid model's caches, and the page arithmetic that engines share."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from aliasstorage.errors import LayoutError
from aliasstorage.layouts.algebra import Layout, field, packed


@dataclass(frozen=True)
class HybridGeometry:
    """A model of softmax-attention layers and linear-attention layers, on one device.

    Attributes:
        attention: Numbers of the layers with keys and values.
        linear: Numbers of the layers with a convolution state and a recurrent state.
        kv_heads: Key-value heads of an attention layer.
        head_dim: Elements of a head's key, and of its value.
        conv: Size of the convolution state of one request.
        state: Size of the recurrent state of one request.
        kv_dtype: Element type of keys and values; ``uint8`` for caches that are read as fp8.
        conv_dtype: Element type of convolution states.
        state_dtype: Element type of recurrent states.
        block_alignment: Attention kernels want a multiple of this many tokens in a block.

    Examples:
        >>> small = HybridGeometry.gated_delta_net(layers=8, interval=4, key_heads=2, value_heads=4,
        ...                                        state_dim=32, kv_heads=2, head_dim=32)
        >>> small.state_bytes, small.block_tokens, small.page_bytes, small.groups
        (17920, 80, 20480, [[3, 7], [0, 4], [1, 5], [2, 6]])
    """

    attention: tuple[int, ...]
    linear: tuple[int, ...]
    kv_heads: int
    head_dim: int
    conv: tuple[int, ...]
    state: tuple[int, ...]
    kv_dtype: torch.dtype = torch.bfloat16
    conv_dtype: torch.dtype = torch.bfloat16
    state_dtype: torch.dtype = torch.float32
    block_alignment: int = 16

    def __post_init__(self) -> None:
        if not self.attention or not self.linear:
            raise LayoutError(
                "A hybrid model needs layers of both kinds.",
                which="attention" if not self.attention else "linear",
                expected="at least one layer number",
                got="none",
                do="Lay out a model of one kind with field and repeated.",
            )

    @classmethod
    def gated_delta_net(
        cls,
        *,
        layers: int,
        interval: int,
        key_heads: int,
        value_heads: int,
        state_dim: int,
        kv_heads: int,
        head_dim: int,
        kernel: int = 4,
        kv_dtype: torch.dtype = torch.bfloat16,
        state_dtype: torch.dtype = torch.float32,
    ) -> HybridGeometry:
        """Return the geometry of Qwen3-Next and its relatives.

        Args:
            layers: All layers; every ``interval``-th one has softmax attention.
            interval: See ``layers``.
            key_heads: Key heads of a linear-attention layer.
            value_heads: Value heads of a linear-attention layer.
            state_dim: Elements of a key and of a value of a linear-attention head.
            kv_heads: Key-value heads of a softmax-attention layer.
            head_dim: Elements of its heads.
            kernel: Taps of the causal convolution.
            kv_dtype: Element type of keys and values.
            state_dtype: Element type of recurrent states.
        """
        return cls(
            tuple(layer for layer in range(layers) if (layer + 1) % interval == 0),
            tuple(layer for layer in range(layers) if (layer + 1) % interval),
            kv_heads,
            head_dim,
            (kernel - 1, state_dim * (2 * key_heads + value_heads)),
            (value_heads, state_dim, state_dim),
            kv_dtype=kv_dtype,
            state_dtype=state_dtype,
        )

    @property
    def conv_bytes(self) -> int:
        """Bytes of one request's convolution state in one layer."""
        return prod(self.conv) * self.conv_dtype.itemsize

    @property
    def recurrent_bytes(self) -> int:
        """Bytes of one request's recurrent state in one layer."""
        return prod(self.state) * self.state_dtype.itemsize

    @property
    def state_bytes(self) -> int:
        """Bytes of both."""
        return self.conv_bytes + self.recurrent_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.kv_dtype.itemsize

    @property
    def block_tokens(self) -> int:
        """Tokens in a block of keys and values: as many as make it hold a state."""
        unit = self.block_alignment * self.token_bytes
        return self.block_alignment * -(-self.state_bytes // unit)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, which holds a block of keys and values or one state."""
        return self.block_tokens * self.token_bytes

    @property
    def groups(self) -> list[list[int]]:
        """Layers by group: layers of one group never share a page, one of each group do."""
        size = len(self.attention)
        count = -(-len(self.linear) // size)
        return [list(self.attention), *(list(self.linear[i::count]) for i in range(count))]

    def state_page(self, layer: int) -> Layout:
        """Return the two states of one request in one layer, one after the other."""
        return packed(
            field(f"L{layer}.conv", self.conv_dtype, self.conv),
            field(f"L{layer}.ssm", self.state_dtype, self.state),
        )
