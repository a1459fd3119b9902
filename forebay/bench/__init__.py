"""Measurements: programs, never timed tests. Claims are ratios from one interleaved run."""
