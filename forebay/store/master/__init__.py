"""Who has what: the sans-IO state machine of the store's master, and its server.

machine.py      step(now, event) -> effects: the only door
  reads.py        exists, match_prefix, query, get, list, stats
  puts.py         put_start / put_end / put_revoke, waiting puts, quotas
  space.py        room in segments: eviction, leases, draining ranges
  burial.py       removals that must be logged before they are acknowledged
  membership.py   holders: registration, inventories, suspicion
  promotion.py    SSD -> DRAM tasks
  claims.py       which generations a holder is believed
records.py      the tables          transitions.py  the life of a replica
extents.py      free space          sketch.py       count-min
invariants.py   what must hold after every step
server.py       asyncio server
"""
