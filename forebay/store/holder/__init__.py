"""A holder keeps bytes: in DRAM it shares read-only with clients on its machine, and in a log on SSD.

node.py       one holder: its parts and their life          master_link.py  what its master says and hears
  data.py       what clients ask of it, over TCP and Unix     door.py         the Unix socket, where descriptors are handed over
  segment.py    the memfd and its headers (rule ST2)           memory.py       what lies where in it
  log/          the SSD log                                   writer.py       the thread that appends to it
  promoter.py   SSD -> DRAM tasks
"""
