"""Costs of a layout and of the transition to it: iteration time, bytes of memory, bytes to move. Pure.

`profile` contains the known times of a model, and `prices` computes iteration times from them. `memory` decides which
layers fit into memory, from the sizes in `tensor_bytes`. `lacking_state` counts the bytes of a transition,
`layout_change` all of its work. The package chooses nothing. Called by the planner and by its searches.
"""
