"""What a page is, for every engine that shares pages: needs neither torch nor this engine.

hashing   the chain that gives pages of equal tokens equal keys
spec      what a page holds for each layer: keys and values, or other planes
block     how one rank's part of a page lies in memory and in the store
layouts   how grids of any shape cut pages, and which of them have written
reader    reads pages out of a store into host memory, whatever grid wrote them
"""
