"""The shipped control code under virtual time and injected faults.

One seed is one history, bit for bit. `history.run_history(seed)` drives the real planner against `grid.FakeGrid`; the checkers stand
outside both. `fuzz` runs many histories; `forebay simulate --fuzz` is its command.
"""
