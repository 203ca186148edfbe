"""Cost of a layout and of the transition to it: time of an iteration, bytes of memory, bytes to move. Pure.

`profile` holds the known times of a model, `prices` computes with them, `memory` decides what fits by `tensor_bytes`,
`lacking_state` counts the bytes of a transition, `layout_change` lists its work. Nothing is chosen here. Called by the
planner and by its searches.
"""
