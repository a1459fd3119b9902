"""Mooncake as L3: pages as objects of a Mooncake cluster that a user already runs.

url.py     mooncake://MASTER:PORT and its options
client.py  Mooncake's own client: set up once, its codes as statuses, registered memory for each thread
store.py   the `PageStore`; values are sealed (`backends/sealed.py`)
"""

from forebay.store.backends.mooncake.store import MooncakeStore
from forebay.store.backends.mooncake.url import MooncakeUrl

__all__ = ["MooncakeStore", "MooncakeUrl"]
