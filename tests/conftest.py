"""What holds for all tests.

Servers have no store unless they ask for one: the default would be the user's own, and start a process more. No example of a property
has to be ready by a deadline: a busy machine may take any time.
"""

import os

from hypothesis import settings

os.environ.setdefault("FOREBAY_STORE", "none")
settings.register_profile("forebay", settings.default, deadline=None)
settings.load_profile("forebay")
