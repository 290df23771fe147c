"""What this library's graphs call besides ATen: `fence`, `materialize` and writes.

``aliasstorage::fence(Tensor(a!)[] windows) -> ()`` does nothing, and declares that it mutates
its arguments, so that no scheduler moves an access of one of them across it. On Inductor it is
a node of the schedule from which no code is generated.

Note [Two kinds of fences]
Problem: C++ compilers assume that pointers to different types do not point at one byte, and may
exchange accesses within a function.
Rule: on Inductor, a fence between several windows also ends the function that is being generated,
as any operation does that is not Inductor's own. A fence of one window only keeps loops apart.
Reason: each further function costs a few microseconds a step.

``aliasstorage::materialize(Tensor x) -> Tensor`` copies, bit for bit. An ``aten.clone`` would be
dropped as a no-op by passes that assume a graph without mutation, and CPU Inductor would take
16-bit floats through float32, which changes the bits of NaNs; on Inductor this calls the clone
kernel instead.

``aliasstorage::write_(Tensor(a!) window, Tensor value) -> ()`` is ``aten.copy_`` for graphs that
Inductor gets.

Note [Writes that Inductor takes for the last one]
Problem: Inductor takes an ``aten.copy_`` to an input for the write-back at the end of a functional
graph, after which nobody looks at the input. A graph that writes ``x.copy_(y)`` and continues with
``z = x.index_put(i, v)`` would become ``x.index_put_(i, v)``.
Rule: graphs for Inductor write windows by ``aliasstorage::write_``.

``aliasstorage::masked_write_(Tensor(a!) window, Tensor mask, Tensor value) -> ()`` writes where the
mask is set, and keeps the bits of the rest.
"""

from __future__ import annotations

from typing import Any

import torch

_library = torch.library.Library("aliasstorage", "DEF")
_library.define("fence(Tensor(a!)[] windows) -> ()")
_library.define("materialize(Tensor x) -> Tensor")
_library.define("write_(Tensor(a!) window, Tensor value) -> ()")
_library.define("masked_write_(Tensor(a!) window, Tensor mask, Tensor value) -> ()")


@torch.library.impl(_library, "fence", "CompositeExplicitAutograd")
def _fence(windows: list[torch.Tensor]) -> None:
    return None


@torch.library.impl(_library, "materialize", "CompositeExplicitAutograd")
def _materialize(x: torch.Tensor) -> torch.Tensor:
    # Copying bools makes 1 of every byte but 0; their bytes are copied instead.
    return x.view(torch.uint8).clone().view(torch.bool) if x.dtype == torch.bool else x.clone()


@torch.library.impl(_library, "write_", "CompositeExplicitAutograd")
def _write(window: torch.Tensor, value: torch.Tensor) -> None:
    window.copy_(value)


@torch.library.impl(_library, "masked_write_", "CompositeExplicitAutograd")
def _masked_write(window: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> None:
    window.copy_(torch.where(mask, value, window))


torch.library.register_fake("aliasstorage::fence", lambda windows: None, lib=_library)
torch.library.register_fake("aliasstorage::materialize", torch.empty_like, lib=_library)
torch.library.register_fake("aliasstorage::write_", lambda window, value: None, lib=_library)
torch.library.register_fake(
    "aliasstorage::masked_write_", lambda window, mask, value: None, lib=_library
)

fence = torch.ops.aliasstorage.fence.default
materialize = torch.ops.aliasstorage.materialize.default
write_ = torch.ops.aliasstorage.write_.default
masked_write_ = torch.ops.aliasstorage.masked_write_.default

# Inductor calls the kernels of these (of index_add for some dtypes), and knows nothing of their
# in-place forms. What it does not know it calls as well, but not where the environment variable CI
# is set: there it refuses what has a decomposition for other compilers.
CALLED_IN_PLACE = (
    torch.ops.aten.index_add_.default,
    torch.ops.aten.index_reduce_.default,
    torch.ops.aten.masked_scatter_.default,
    torch.ops.aten.put_.default,
)

_lowerings_registered = False


def register_inductor_lowerings() -> None:
    """Teach Inductor what rewritten graphs call; called before the first compilation."""
    global _lowerings_registered
    if _lowerings_registered:
        return
    _lowerings_registered = True
    from aliasstorage._compat import inductor_ir as ir
    from aliasstorage._compat import inductor_lowering, inductor_virtualized

    class Fence(ir.ExternKernel):
        """Mutates its inputs as far as the scheduler can tell, and generates no code."""

        def __init__(self, windows: list[Any]) -> None:
            layout = ir.NoneLayout(device=windows[0].get_device())
            super().__init__(None, layout, self.unwrap_storage(windows))
            graph = inductor_virtualized.V.graph
            self.one_window = len(windows) == 1
            self.name = graph.register_buffer(self)
            graph.register_operation(self)
            self.mutation_outputs = [ir.MutationOutput(layout, window, self) for window in windows]

        def codegen(self, wrapper: Any) -> None:
            pass

        def is_no_op(self) -> bool:
            # See Note [Two kinds of fences].
            return self.one_window

        def should_allocate(self) -> bool:
            return False

        def has_side_effects(self) -> bool:
            return True

        def get_unbacked_symbol_defs(self) -> Any:
            return set()

    def lower_fence(windows: list[Any]) -> None:
        if not windows:
            return  # for passes on graphs; lowered one after the other, nodes keep their order
        for window in windows:
            window.realize()
            # What reads a window is computed before the fence. Left to the mutation that the
            # fence declares, it would be computed right after it, and fused with a later write.
            inductor_virtualized.V.graph.mark_buffer_mutated(window.get_name())
        Fence(windows)

    def lower_materialize(x: Any) -> Any:
        clone = materialize if x.get_dtype() == torch.bool else torch.ops.aten.clone.default
        return ir.TensorBox.create(ir.FallbackKernel.create(clone, x))

    def lower_write(window: Any, value: Any) -> None:
        inductor_lowering.lowerings[torch.ops.aten.copy_.default](window, value)

    register = inductor_lowering.register_lowering
    register(fence, type_promotion_kind=None)(lower_fence)
    register(materialize, type_promotion_kind=None)(lower_materialize)
    register(write_, type_promotion_kind=None)(lower_write)
    for operation in CALLED_IN_PLACE:
        inductor_lowering.make_fallback(operation, warn=False, override_decomp=True)
