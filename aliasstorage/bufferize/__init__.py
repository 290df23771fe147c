"""Turn the functional writes of a byte graph back into in-place writes on typed windows.

`recognize` reads windows, reads and writes from a graph; `analyze` decides which writes happen in
place; `plan` decides, on plain data, what is copied and where a fence goes; `emit` rewrites the
graph. `driver` puts them around an inner compiler, `custom_ops` and `triton_kernels` make calls of
others again on typed windows, and `aliasstorage.ops` holds what the rewritten graph calls besides.
"""
