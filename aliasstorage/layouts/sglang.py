"""How SGLang lays out its unified memory pool (``--enable-unified-memory``, 2026)."""

from __future__ import annotations

from aliasstorage.layouts.algebra import Layout, field, overlay, packed, repeated
from aliasstorage.layouts.geometry import HybridGeometry


def unified_memory(
    geometry: HybridGeometry, tokens: int, requests: int, page_tokens: int = 1
) -> Layout:
    """Return two lattices over all bytes of one buffer, which overlap everywhere.

    One is of pages of keys and values, all layers of a page together; the other one of requests'
    states, all layers of a request together. Allocators keep them apart: one grows up, one down.

    Args:
        geometry: The model. SGLang keeps convolution states as (channel, tap).
        tokens: Tokens of which the buffer holds keys and values, if it held nothing else.
        requests: Requests whose states the buffer holds besides.
        page_tokens: Tokens in a page.
    """
    row = (page_tokens, geometry.kv_heads, geometry.head_dim)
    page = packed(
        *(
            field(f"L{layer}.{name}", geometry.kv_dtype, row)
            for layer in geometry.attention
            for name in ("k", "v")
        )
    )
    layers = len(geometry.linear)
    states = packed(
        field("mamba.conv", geometry.conv_dtype, (layers, *reversed(geometry.conv))),
        field("mamba.temporal", geometry.state_dtype, (layers, *geometry.state)),
    )
    token_bytes = page.nbytes // page_tokens
    nbytes = -(-(tokens * token_bytes + requests * states.nbytes) // 4) * 4
    return overlay(
        repeated(page, nbytes // page.nbytes),
        repeated(states, nbytes // states.nbytes, dim=1),
        nbytes=nbytes,
    )
