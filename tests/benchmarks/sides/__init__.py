"""Ours, and the raw limit: the functions that actors call."""
