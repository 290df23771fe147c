"""Typed windows over one traceable byte buffer: mixed-dtype caches under `torch.compile`."""

from aliasstorage import errors, layouts
from aliasstorage.caches.byte_storage import ByteStorage
from aliasstorage.caches.consolidate import consolidate_
from aliasstorage.caches.wrap import unwrap, unwrap_module_, wrap, wrap_module_
from aliasstorage.compilation.backend import backend
from aliasstorage.errors import AliasStorageError
from aliasstorage.explain import Explanation, explain
from aliasstorage.recorder import RecordedGraph, Recorder
from aliasstorage.subclass import (
    dispatch as _dispatch,  # noqa: F401  (does the operations of AliasTensor)
)
from aliasstorage.subclass.alias_tensor import AliasTensor
from aliasstorage.version import __version__
from aliasstorage.windows.window import Window

__all__ = [
    # Values
    "Window",
    "AliasTensor",
    "ByteStorage",
    "layouts",
    # Conversions
    "wrap",
    "unwrap",
    "consolidate_",
    "wrap_module_",
    "unwrap_module_",
    # Compilation
    "backend",
    "explain",
    "Explanation",
    "Recorder",
    "RecordedGraph",
    # Errors
    "AliasStorageError",
    "errors",
    "__version__",
]
