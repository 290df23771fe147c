"""A stand-in for a Triton kernel that runs on the CPU, called as Dynamo calls real ones."""

from __future__ import annotations

import torch
import torch._higher_order_ops.triton_kernel_wrap as triton_kernel_wrap


class Kernel:
    """Stands for a Triton kernel: what the operator needs of one, running on the CPU."""

    __name__ = "write_token"
    arg_names = ("keys", "state", "values", "slot")

    def __getitem__(self, grid):
        def launch(keys, state, values, slot):
            keys[slot] = values.to(keys.dtype)
            state[slot] += values

        return launch


KERNEL = Kernel()


# Dynamo learns nothing of what a kernel writes, and so nothing of this operation.
@torch.library.custom_op("tests::write_token", mutates_args=())
def write_token(keys: torch.Tensor, state: torch.Tensor, values: torch.Tensor, slot: int) -> None:
    KERNEL[(1,)](keys, state, values, slot)


@write_token.register_fake
def _(keys, state, values, slot):
    return None


def as_triton(backend):
    """Return a backend whose graphs call the kernel instead of the custom operation."""

    def with_kernel(module, example_inputs):
        graph, table = module.graph, triton_kernel_wrap.kernel_side_table
        for node in graph.nodes:
            if "write_token" in str(node.target):
                keys, state, values, slot = node.args
                node.target = triton_kernel_wrap.triton_kernel_wrapper_mutation
                node.args = ()
                node.kwargs = {
                    "kernel_idx": table.add_kernel(KERNEL),
                    "constant_args_idx": table.add_constant_args({"slot": slot}),
                    "grid": [(1, 1, 1)],
                    "tma_descriptor_metadata": {},
                    "kwargs": {"keys": keys, "state": state, "values": values},
                }
        module.recompile()
        return backend(module, example_inputs)

    return with_kernel
