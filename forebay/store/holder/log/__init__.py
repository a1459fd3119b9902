"""The SSD log: append-only files of checksummed records, and an index of them in memory.

record.py   one record's bytes            scan.py    a file's records, torn tail cut: for starts and for fsck
files.py    the layer that faults are injected under    index.py  which records count: highest generation, tombstones
log.py      append, read, bury, evict     hints.py  where records lie, for clients on the same machine
"""
