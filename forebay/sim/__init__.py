"""The shipped control code under virtual time and injected faults.

One seed is one history, bit for bit. `history.run_history(seed)` drives the real planner against `grid.FakeGrid`; the checkers stand
outside both. `fuzz` runs many histories; `forebay simulate --fuzz` is its command.

`study` replays traces on described clusters: the same planner over performance models (`cluster` -> `replay` -> `stages`, `holders`),
for whoever wants to know what hardware would bring; `forebay simulate TRACE` is its command, and `validate` says how far to believe it.
"""
