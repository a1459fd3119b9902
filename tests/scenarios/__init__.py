"""What the planner and the store's master must do, as scripts that read like a specification: `*.txt` beside this file.

A line at the margin is a command, indented lines below it are all that came of it, `#` begins a comment.
`python -m tests.scenarios --rewrite` writes the effects anew; `test_scenarios.py` compares.
"""
