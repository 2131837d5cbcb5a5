"""Whole jobs on real processes, and what becomes of them under faults."""
