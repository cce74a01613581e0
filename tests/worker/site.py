"""A site that writes steadily, in blocks that begin with a write, and tells how long each took.

Run as `python -m tests.worker.site SECONDS`; prints JSON at the end.
"""

from __future__ import annotations

import json
import sys
import time

import django

django.setup()

from django.db import transaction  # noqa: E402

from myxo_jobs import Jobs  # noqa: E402
from tests.app.models import Note  # noqa: E402
from tests.worker.jobs import Tally  # noqa: E402

jobs = Jobs()


def main(seconds: float) -> None:
    took: list[float] = []
    errors: list[str] = []
    ends = time.monotonic() + seconds
    put = 0
    while time.monotonic() < ends:
        began = time.monotonic()
        try:
            with transaction.atomic():
                note = Note.objects.create(text="one two three")
                jobs.put(Tally(note_id=note.pk))
                Note.objects.filter(pk=note.pk).exists()
            put += 1
        except Exception as error:
            errors.append(repr(error))
        took.append(time.monotonic() - began)
        time.sleep(0.02)
    print(json.dumps({"put": put, "took": took, "errors": errors}))


if __name__ == "__main__":
    main(float(sys.argv[1]))
