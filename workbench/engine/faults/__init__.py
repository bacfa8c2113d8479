"""Faults: one file a kind, named as the user types it (`drop_link` is drop-link).

Each has `strike(fault)`, called once by the thread that trains, in the middle of a step, and HOWS,
the ways there are, the usual one first. What lasts (LASTS) has `undo()` as well.
"""
