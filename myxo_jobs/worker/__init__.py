"""The worker: one process, or a part of one, that takes, runs and settles jobs.

`running` runs one job, `connections` keeps a handler's thread fit for the next,
`slots` are the threads and the event loop that jobs run in, `settling` stores the
outcomes, `leases` keeps the claims, `waking` learns of new jobs, and `worker` is the
loop that drives them all.
"""

from myxo_jobs.worker.worker import Worker

__all__ = ["Worker"]
