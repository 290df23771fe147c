"""How vLLM's Ascend plugin lays out its caches: contiguous regions instead of pages."""

from __future__ import annotations

from aliasstorage.errors import LayoutError
from aliasstorage.layouts.algebra import Layout, field, overlay, packed, repeated
from aliasstorage.layouts.geometry import HybridGeometry


def contiguous_regions(
    geometry: HybridGeometry, blocks: int, kernel_tokens: int = 128
) -> list[Layout]:
    """Return one tensor for a layer of each group, of three regions.

    All convolution states; then all recurrent states, which are the same bytes as all keys; then
    all values.

    Args:
        geometry: The model. A block's keys must have exactly the bytes of a recurrent state.
        blocks: Number of blocks.
        kernel_tokens: Tokens in a block of the attention kernel.

    Raises:
        LayoutError: Keys and recurrent states differ in length.
    """
    token = geometry.token_bytes // 2
    tokens = kernel_tokens * -(-geometry.recurrent_bytes // (kernel_tokens * token))
    if tokens * token != geometry.recurrent_bytes:
        raise LayoutError(
            "A block of keys and a recurrent state differ in length.",
            which=f"keys of {tokens} tokens, and states of size {geometry.state}",
            expected=f"{geometry.recurrent_bytes} bytes of keys",
            got=f"{tokens * token} bytes",
            do="Choose another kernel_tokens, or vllm.shared_by, which pads pages.",
        )
    attention, *linear = geometry.groups
    count = blocks * tokens // kernel_tokens
    size = (count, kernel_tokens, geometry.kv_heads, geometry.head_dim)
    layouts = []
    for slot, layer in enumerate(attention):
        sharing = [group[slot] for group in linear if slot < len(group)]
        layouts.append(
            packed(
                overlay(
                    *(
                        repeated(field(f"L{n}.conv", geometry.conv_dtype, geometry.conv), blocks)
                        for n in sharing
                    )
                ),
                overlay(
                    field(f"L{layer}.k", geometry.kv_dtype, size),
                    *(
                        repeated(field(f"L{n}.ssm", geometry.state_dtype, geometry.state), blocks)
                        for n in sharing
                    ),
                ),
                field(f"L{layer}.v", geometry.kv_dtype, size),
            )
        )
    return layouts
