"""Servers of tests have no store unless they ask for one: the default would be the user's own, and start a process more."""

import os

os.environ.setdefault("FOREBAY_STORE", "none")
