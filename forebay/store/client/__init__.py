"""The client's side of the store.

store.py     StoreClient, the blocking face        aio.py        the same as coroutines
one_master.py   what it is for each master
gets.py      one batch of reads, with failover     puts.py       one batch of writes
channel.py   one blocking connection               holders.py    where holders are and how to reach them
throttle.py  what was prefetched lately            prefetcher.py the threads behind `exists(prefetch=True)`
"""
