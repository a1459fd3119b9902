"""Valkey and Redis as L3: pages as plain string values of a server that a user already runs.

url.py         valkey://, redis://, valkeys://, rediss:// and their options
resp.py        the protocol (RESP2): commands as buffers, values received where they belong
connection.py  one authenticated connection; a pipeline with one deadline
topology.py    which server has a key: one, or the masters of a cluster
values.py      a value on the server: the page, then a trailer that says whose it is and that it is whole
store.py       the `PageStore`
"""

from forebay.store.backends.redis.store import RedisStore
from forebay.store.backends.redis.url import RedisUrl

SCHEMES = RedisUrl.SCHEMES
__all__ = ["SCHEMES", "RedisStore", "RedisUrl"]
