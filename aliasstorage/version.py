"""The version of this library, which is also a part of the keys of caches on disk."""

__version__ = "0.1.0"
