"""The forms in which an inner backend is given windows, and the default of each backend.

Note [What form a backend is given]
* ``windows``: AOTAutograd is driven here. Windows are traced as `AliasTensor`, the byte graph is
  bufferized, and the backend gets ATen operations on typed inputs, written in place. It needs
  inputs that it may write, and operations that keep their order where they write.
* ``bytes``: plain torch operations on one byte buffer per storage: as_strided, view and squeeze,
  and ordinary in-place operations on the result. It needs uint8, as_strided and its scatter.
* ``slices``: the same by slices and views alone, for backends without as_strided, or that ignore
  storage offsets. Windows whose dimensions do not nest are refused.
* ``arrays``: as ``windows``, on separate arrays that are copied from the storage and back around
  each call. It needs nothing but typed arrays, costs the windows' bytes at each call, and refuses
  windows that share bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, cast, get_args

import torch

from aliasstorage.errors import BackendUnsupportedError

Form = Literal["windows", "bytes", "slices", "arrays"]

AOT_EAGER = ("aot_eager", "aot_eager_default_partitioner", "aot_eager_decomp_partition")

# What was found to work best; all other backends are given bytes.
_DEFAULTS: dict[Any, Form] = {
    "inductor": "windows",
    **dict.fromkeys(AOT_EAGER, "windows"),
    "iree_turbine": "slices",
    "openvino": "slices",
}


# Options without which a backend is wrong: OpenVINO loses mutations of its inputs.
BACKEND_OPTIONS: dict[str, dict[str, Any]] = {"openvino": {"aot_autograd": True}}


# Forms in which a backend was found to be silently wrong, and dtypes of windows with which it
# is, or crashes the process. They are refused by name.
_ALIASES = "it returns aliases of a storage that was written where the program copies"
_WRONG_FORMS: dict[str, dict[Form, str]] = {
    "inductor": {"bytes": _ALIASES, "slices": _ALIASES},
    "openvino": {"windows": "it does not keep the order of reads and writes of shared bytes"},
}
_WRONG_DTYPES: dict[str, tuple[str, frozenset[torch.dtype]]] = {
    "iree_turbine": ("it crashes the process", frozenset({torch.complex64, torch.complex128})),
    "openvino": ("it is silently wrong", frozenset({torch.bool, torch.int64, torch.float64})),
}


def check_dtypes(inner: Any, dtypes: Iterable[torch.dtype]) -> None:
    """Raise `BackendUnsupportedError` for windows that a backend is known to get wrong."""
    reason, wrong = _WRONG_DTYPES.get(inner if isinstance(inner, str) else "", ("", frozenset()))
    for dtype in dtypes:
        if dtype in wrong:
            raise BackendUnsupportedError(
                "A backend cannot take windows of a dtype.",
                which=f"inner={inner!r}",
                expected=f"no windows of {', '.join(sorted(map(str, wrong)))}",
                got=f"a window of {dtype}: {reason}",
                do="Keep such tensors outside the function, or choose another backend.",
            )


def form_of(inner: Any, form: str | None) -> Form:
    """Return the form for an inner backend: the one asked for, or its default.

    Raises:
        BackendUnsupportedError: There is no such form.
    """
    if form is None:
        return _DEFAULTS.get(inner if isinstance(inner, str) else None, "bytes")
    if form not in get_args(Form):
        raise BackendUnsupportedError(
            "There is no such form.",
            which=f"form={form!r}",
            expected=f"one of {', '.join(get_args(Form))}",
            got=repr(form),
            do="See docs/backends.md for what each form needs from a backend.",
        )
    reason = _WRONG_FORMS.get(inner if isinstance(inner, str) else "", {}).get(cast(Form, form))
    if reason is not None:
        raise BackendUnsupportedError(
            "A backend cannot be given this form.",
            which=f"inner={inner!r}",
            expected=f"another form than {form!r}",
            got=f"form={form!r}, where {reason}",
            do="Leave form out; each backend has a default.",
        )
    return cast(Form, form)
