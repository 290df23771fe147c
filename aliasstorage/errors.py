"""Every error this library raises, in one place.

A message says what went wrong, with which input, what was expected, what was found, and
what to do. Each class also derives from the builtin that a caller would catch, so code that
does not know this library keeps working.
"""

from __future__ import annotations

__all__ = [
    "AliasStorageError",
    "BackendUnsupportedError",
    "BackwardWriteError",
    "GradientWriteError",
    "IncompatibleTorchError",
    "InvalidWindowError",
    "LayoutError",
    "MetadataMutationError",
    "MisalignedWindowError",
    "MixedAliasError",
    "RequiresGradError",
    "UnsupportedOpError",
    "UnsupportedTensorError",
    "WindowOutOfBoundsError",
]


class AliasStorageError(Exception):
    """Base of all errors of this library.

    Args:
        what: What went wrong, one sentence.
        which: The input, operation or window it is about.
        expected: What would have been accepted.
        got: What was found.
        do: What the caller can do about it.

    Examples:
        >>> print(AliasStorageError("A thing is off.", which="input a", do="Turn it on."))
        A thing is off.
          which:    input a
          do:       Turn it on.
    """

    def __init__(
        self,
        what: str,
        *,
        which: str | None = None,
        expected: str | None = None,
        got: str | None = None,
        do: str | None = None,
    ) -> None:
        self.what, self.which, self.expected, self.got, self.do = what, which, expected, got, do
        fields = (("which", which), ("expected", expected), ("got", got), ("do", do))
        lines = [what] + [f"  {name + ':':<9} {value}" for name, value in fields if value]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[object, ...]:
        fields = {"which": self.which, "expected": self.expected, "got": self.got, "do": self.do}
        return (_rebuild, (type(self), self.what, fields))


def _rebuild(cls: type[AliasStorageError], what: str, fields: dict[str, str]) -> AliasStorageError:
    return cls(what, **fields)


class IncompatibleTorchError(AliasStorageError, ImportError):
    """A release of torch without the private names that this library uses."""


class InvalidWindowError(AliasStorageError, ValueError):
    """A window's dtype, size, stride or byte offset makes no sense on its own."""


class MisalignedWindowError(InvalidWindowError):
    """A byte offset or a byte stride is not a multiple of the dtype's itemsize."""


class WindowOutOfBoundsError(AliasStorageError, IndexError):
    """A window reaches past the bytes of its buffer."""


class LayoutError(AliasStorageError, ValueError):
    """A layout whose parts do not fit: a page too small, a name twice, a storage too short."""


class UnsupportedTensorError(AliasStorageError, TypeError):
    """A tensor that has no strided bytes: sparse, quantized, nested, or another subclass."""


class UnsupportedOpError(AliasStorageError, NotImplementedError):
    """An operation that cannot be right on a window."""


class MetadataMutationError(UnsupportedOpError):
    """An operation that would change a window's size, stride, offset or storage in place."""


class RequiresGradError(AliasStorageError, RuntimeError):
    """A window was asked to require gradients, or a tensor that does was wrapped."""


class GradientWriteError(AliasStorageError, RuntimeError):
    """A value that requires gradients was written into a window while autograd records."""


class BackwardWriteError(AliasStorageError, RuntimeError):
    """A compiled function writes a window in its backward pass."""


class MixedAliasError(AliasStorageError, RuntimeError):
    """Stock ``torch.compile`` was handed a window and a plain tensor over the same storage."""


class BackendUnsupportedError(AliasStorageError, RuntimeError):
    """A compile backend or an option that this library cannot drive."""


class ExportError(AliasStorageError, RuntimeError):
    """`torch.export` was given a window, or a storage whose bytes are not the module's."""
