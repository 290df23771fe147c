"""From the graph that Dynamo captured to the function that each call runs.

In: a Dynamo graph and its example inputs. Out: a function of the same inputs. On the way the
inputs of a storage become one, an inner backend compiles the graph, and ``bufferize`` writes it in
place. Imports ``windows``, ``subclass`` and ``bufferize``. In the order of the data:

* `backend`: ``torch.compile(..., backend="aliasstorage")``.
* `compile_graph`: the steps below, one after the other.
* `graph_copies`: copies of Dynamo's graph.
* `eager_aliasing`: results that must alias what they alias in eager PyTorch.
* `input_storages`: which inputs share a storage. `mutated_inputs`: which are written.
* `merge_inputs`: the graph with one input for each storage.
* `lowering_forms`, `slice_regeneration`: which form of the graph an inner backend is given.
* `inner_compilers`: how each inner backend is driven.
* `graph_listeners`: who is shown those graphs.
* `alias_guards`: what a graph assumes of how its inputs alias, and the check of it.
* `runtime_wrapper`: what happens at each call.
"""
