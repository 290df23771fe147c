"""How users get windows: from a storage, from tensors that exist, from a cache object.

In: tensors, pytrees, modules, cache objects. Out: `AliasTensor` windows over one byte buffer for
each storage. Imports ``windows`` and ``subclass``.

* `byte_storage`: `ByteStorage`, which allocates or adopts a storage and gives windows of it.
* `wrap`: windows for the tensors of a pytree or a module, and back.
* `consolidate`: moves the tensors of a cache object into one storage.
"""
