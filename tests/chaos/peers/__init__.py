"""The kills of `tests.chaos.kills` against other queues that keep their jobs in PostgreSQL."""
