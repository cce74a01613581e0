"""A project of any time zone: put jobs and run them, and tell what happened, as JSON.

Run by tests/worker/test_zones.py as `python -W error -m tests.worker.zones DELAY`.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import datetime, timedelta

import django

django.setup()

import msgspec  # noqa: E402
from django.conf import settings  # noqa: E402
from django.utils import timezone  # noqa: E402

from myxo_jobs import Jobs, Run, job  # noqa: E402
from myxo_jobs.models import Job  # noqa: E402
from myxo_jobs.testing import Worker  # noqa: E402

jobs = Jobs()
starts: dict[str, list[float]] = {}
created: dict[str, datetime] = {}


class Sleep(msgspec.Struct, frozen=True):
    name: str
    seconds: float = 0.0


@job(Sleep, topic="zones.Sleep", workers=4, lease=1.0)
def sleep(request: Sleep, run: Run) -> None:
    starts.setdefault(request.name, []).append(time.monotonic())
    created[request.name] = run.created_at
    time.sleep(request.seconds)


def main(delay: float) -> None:
    began = time.monotonic()
    now = timezone.now()  # naive without USE_TZ, and then in the project's zone
    jobs.put(Sleep("now", seconds=3.0))  # three leases
    jobs.put(Sleep("delayed"), delay=delay)
    jobs.put(Sleep("at"), at=now + timedelta(seconds=delay))
    row = Job.objects.get(payload__contains='"at"')
    with Worker(topics=["zones.Sleep"]), Worker(topics=["zones.Sleep"]):
        while Job.objects.exists() and time.monotonic() - began < 30:
            time.sleep(0.02)
    told = {
        "use_tz": settings.USE_TZ,
        "left": Job.objects.count(),
        "starts": {name: [at - began for at in moments] for name, moments in starts.items()},
        # What a moment read back is off by, in seconds: a lost zone is hours.
        "off": {
            "due": abs((row.due - now).total_seconds() - delay),
            "created_at": abs((row.created_at - now).total_seconds()),
            "run.created_at": abs((created["now"] - now).total_seconds()),
        },
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main(float(sys.argv[1]))
