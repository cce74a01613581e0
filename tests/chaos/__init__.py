"""Faults, real ones, and what must hold after them: `python -m tests.chaos --list`."""
