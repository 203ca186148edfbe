"""Cost of a layout and of the transition to it: time of an iteration, bytes of memory, bytes to move. Pure.

`profile` holds the known times of a model, `prices` computes with them, `memory` decides what fits, `layout_change`
lists the work of a transition. Nothing is chosen here. Called by the planner and by its searches.
"""
