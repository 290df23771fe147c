"""Layouts of cache storages: a small algebra, and what real engines do as functions of it."""

from aliasstorage.layouts import ascend, sglang, vllm
from aliasstorage.layouts.algebra import (
    Layout,
    consolidated,
    field,
    overlay,
    packed,
    repeated,
)
from aliasstorage.layouts.geometry import HybridGeometry

__all__ = [
    # Say what lies where
    "Layout",
    "field",
    "packed",
    "overlay",
    "repeated",
    "consolidated",
    # Engines
    "HybridGeometry",
    "vllm",
    "sglang",
    "ascend",
]
