"""Windows as plain data, and the arithmetic of their bytes.

In: dtypes, sizes, strides and byte offsets. Out: `Window` values, what they share, and the byte
buffer of a storage. Imports torch and ``errors`` only: no dispatch, no fx, nothing compiled.

* `window`: a window, its checks, its views, and how its typed view is regenerated from a buffer.
* `overlap`: do two windows share a byte? Alias classes.
* `byte_buffers`: one buffer object for each storage, held weakly.
* `memory_map`: a picture of what lies where.
"""
