"""The tensor subclass: what happens when an operation reaches a window.

In: operations on `AliasTensor`, over real bytes or in a trace. Out: the same operations on typed
views; in a trace, functional reads and writes of one byte buffer. Imports ``windows``.

* `alias_tensor`: `AliasTensor`, its flatten protocol, copies, pickles and refusals.
* `dispatch`: what an operation does to windows. `operator_schemas`: what its schema says of it.
* `exact_writes`: writes that keep every bit of what they do not reach.
* `preserved_copies`: copies that a compiler would drop, and that must stay copies.
* `window_arguments`: the windows among the arguments of one call; which overlap; calls on copies.
* `higher_order_operators`: attention, branches, loops, regions, Triton kernels.
* `functional_buffers`: while AOTAutograd traces, one functional buffer for each byte buffer.
* `symbolic_offsets`: offsets that change from call to call, while Dynamo traces.
"""
