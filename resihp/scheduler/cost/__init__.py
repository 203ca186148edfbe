"""What a layout and the way to it cost: time of an iteration, bytes of memory, bytes to move. Pure.

`profile` is all that is known of a model's times, `prices` reckons with it, `memory` says what fits, `layout_change`
what a transition has to do. Chooses nothing. Called by the planner and by those who search for it.
"""
