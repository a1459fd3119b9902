"""`forebay bench tiers MODEL`: hits from every tier, what the tiers cost when they do not help, and the rate of copies.

hits     time to first token of a prompt whose every page comes from device memory, host memory, the store's memory, the disk
cost     CPU time beside the forward passes, with one tier after another switched on and nothing to be hit
copies   the copy threads' rate beside memcpy of the same pieces in the same order
"""
