"""One process that does one thing for a scenario: `python -m tests.benchmarks.actor`.

It gets the name of a function, as in `sides.ours.drain`, and its arguments as JSON. It
says `ready` once it may begin, begins when it is told to, and ends by writing what the
function returned, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module


class Cue:
    """How an actor and the scenario that started it agree on moments."""

    def __init__(self) -> None:
        # Whatever else is printed must not be taken for an answer.
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def ready(self) -> None:
        """Say that everything is prepared, and wait until the scenario says to begin."""
        self.answer("ready")
        self.wait_for_word()

    def wait_for_word(self) -> None:
        """Wait until the scenario says something, or is gone."""
        sys.stdin.readline()

    def answer(self, word: str) -> None:
        print(word, file=self._answers, flush=True)


def main() -> None:
    module, _, function = sys.argv[1].rpartition(".")
    act = getattr(import_module(f"tests.benchmarks.{module}"), function)
    cue = Cue()
    cue.answer(json.dumps(act(cue, **json.loads(sys.argv[2]))))
    sys.stdout.flush()
    os._exit(0)  # whatever threads a peer's worker leaves


if __name__ == "__main__":
    main()
