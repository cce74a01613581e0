"""The worker: one process, or a part of one, that takes, runs and settles jobs.

`running` runs one job, `connections` keeps a handler's thread fit for the next,
`slots` are the threads and the event loop that jobs run in, `settling` stores the
outcomes, `leases` keeps the claims, `waking` learns of new jobs, and `worker` is the
loop that drives them all; `limits` ends runs that take too long. With several processes
the `supervisor` looks after them, and a `board` is what each of them tells it.
"""

from myxo_jobs.worker.supervisor import Supervisor
from myxo_jobs.worker.worker import Worker

__all__ = ["Supervisor", "Worker"]
