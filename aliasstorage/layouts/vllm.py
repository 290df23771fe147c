"""How vLLM lays out its caches.

Sources: vLLM's ``kv_cache_utils``, ``kv_cache_interface`` and attention backends, through 0.28 and
after the standardized layouts of pull request #51718 (August 2026).
"""

from __future__ import annotations

from typing import Literal

import torch

from aliasstorage.layouts.algebra import Layout, field, overlay, packed, repeated
from aliasstorage.layouts.geometry import HybridGeometry

StandardLayout = Literal["LBNHC", "LBHNC", "BLNHC", "BLHNC"]


def shared_by(geometry: HybridGeometry, blocks: int) -> list[Layout]:
    """Return vLLM's layouts through 0.28: one tensor for a layer of each group.

    A page holds a block of keys, then of values, of the attention layer, or the convolution and
    recurrent state of one request in one of the linear-attention layers.

    Args:
        geometry: The model.
        blocks: Pages in each tensor; page 0 is the null block.

    Examples:
        >>> geometry = HybridGeometry.gated_delta_net(
        ...     layers=4, interval=4, key_heads=1, value_heads=2, state_dim=16,
        ...     kv_heads=1, head_dim=16,
        ... )
        >>> (layout,) = shared_by(geometry, blocks=64)
        >>> sorted(layout)
        ['L0.conv', 'L0.ssm', 'L1.conv', 'L1.ssm', 'L2.conv', 'L2.ssm', 'L3.k', 'L3.v']
        >>> layout["L3.v"].byte_offset, layout["L2.ssm"].byte_offset
        (1536, 384)
    """
    attention, *linear = geometry.groups
    block = (geometry.block_tokens, geometry.kv_heads, geometry.head_dim)
    layouts = []
    for slot, layer in enumerate(attention):
        keys_and_values = packed(
            field(f"L{layer}.k", geometry.kv_dtype, block),
            field(f"L{layer}.v", geometry.kv_dtype, block),
        )
        states = [geometry.state_page(group[slot]) for group in linear if slot < len(group)]
        page = overlay(keys_and_values, *states, nbytes=geometry.page_bytes)
        layouts.append(repeated(page, blocks))
    return layouts


def one_allocation(
    geometry: HybridGeometry, blocks: int, order: StandardLayout = "LBNHC"
) -> Layout:
    """Return vLLM's standardized layouts: one allocation, and groups that overlay each other.

    Keys and values of a head stand side by side: ``L3.kv`` is (block, head, token, key then
    value), ``L3.k`` and ``L3.v`` are (block, token, head, element) of it.

    Args:
        geometry: The model.
        blocks: Pages of each layer.
        order: From the outermost: L layers, B blocks, N tokens, H heads, C key and value. "NHD" in
            vLLM's terms is LBNHC, "HND" is LBHNC.
    """
    attention, *linear = geometry.groups
    pages = [_attention_page(geometry, layer, order[2:]) for layer in attention]
    states = [
        [geometry.state_page(group[slot]) for group in linear if slot < len(group)]
        for slot in range(len(attention))
    ]
    slots = [
        overlay(page, *others, nbytes=geometry.page_bytes)
        for page, others in zip(pages, states, strict=True)
    ]
    if order[0] == "L":
        return packed(*(repeated(slot, blocks) for slot in slots))
    return repeated(packed(*slots), blocks)


def _attention_page(geometry: HybridGeometry, layer: int, order: str) -> Layout:
    dim, dtype = geometry.head_dim, geometry.kv_dtype
    both = field(f"L{layer}.kv", dtype, (2 * dim,))
    cell = packed(field(f"L{layer}.k", dtype, (dim,)), field(f"L{layer}.v", dtype, (dim,)))
    tokens, heads = geometry.block_tokens, geometry.kv_heads
    if order == "NHC":
        page = [repeated(repeated(part, heads), tokens) for part in (both, cell)]
        return overlay(page[0].permuted(1, 0, 2), page[1])
    page = [repeated(repeated(part, tokens), heads) for part in (both, cell)]
    return overlay(page[0], page[1].permuted(1, 0, 2))


def int8_per_token_head(blocks: int, tokens: int, heads: int, head_dim: int) -> Layout:
    """Return an int8 cache with one float32 scale for each token and head, in the cell itself.

    A cell is key, key scale, value, value scale.

    Args:
        blocks: Number of blocks.
        tokens: Tokens in a block.
        heads: Key-value heads.
        head_dim: Elements of a head; a multiple of 4, since scales follow.
    """
    half = [
        packed(field(name, torch.int8, (head_dim,)), field(f"{name}_scale", torch.float32))
        for name in ("k", "v")
    ]
    cell = packed(*half)
    both = field("kv", torch.int8, (cell.nbytes,))
    cells = repeated(repeated(cell, heads), tokens)
    whole = repeated(repeated(both, heads), tokens).permuted(1, 0, 2)
    return repeated(overlay(whole, cells), blocks)
