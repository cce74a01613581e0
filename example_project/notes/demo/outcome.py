"""What is true after a run, from the tables, the ledger and an independent count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec

from example_project.notes.models import Note
from myxo_jobs.models import Job


class Put(msgspec.Struct, frozen=True):
    """A note and its job, put in a block that committed."""

    job_id: int
    note_id: int
    name: str
    words: int  # counted by the demo
    broken: bool


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    puts: int
    rolled_back: int
    left_by_rolled_back: int  # notes and jobs of them that are there
    skipped: int  # files that are no text, or cannot be read
    left_by_killed: int  # jobs that the killed worker held
    done: int
    run_twice: int
    failed: int
    failed_otherwise: int  # not broken and failed, or broken and not
    unfinished: int
    lost: int
    equal: int
    different: int
    seconds: float
    exit_status: int | None

    @property
    def jobs_per_second(self) -> float:
        return (self.done + self.failed) / self.seconds if self.seconds > 0 else 0.0

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """Yield the table: a name, a number, a remark."""
        skipped = f"{self.skipped:,} more are no text" if self.skipped else ""
        yield "files", f"{self.puts + self.rolled_back:,}", skipped
        yield "jobs put", f"{self.puts:,}", "each in one block with its note"
        yield "rolled back", f"{self.rolled_back:,}", "on purpose: no note, no job"
        yield "done", f"{self.done:,}", ""
        held = f"of the {self.left_by_killed:,} that the killed worker held"
        yield "run twice", f"{self.run_twice:,}", held
        yield "failed and kept", f"{self.failed:,}", "their notes are broken: see below"
        yield "lost", f"{self.lost:,}", ""
        counts = f"equal an independent count, {self.different:,} do not"
        yield "word counts", f"{self.equal:,}", counts
        speed = f"in {self.seconds:.1f} s: puts, kill and the wait for its leases included"
        yield "jobs per second", f"{self.jobs_per_second:,.0f}", speed

    def faults(self) -> list[str]:
        """Return what is not as promised; empty when all is well."""
        found = {
            "lost": self.lost,
            "unfinished": self.unfinished,
            "failed though their notes are well, or the other way round": self.failed_otherwise,
            "notes or jobs of blocks that were rolled back": self.left_by_rolled_back,
            "word counts that differ": self.different,
        }
        faults = [f"{count:,} {what}" for what, count in found.items() if count]
        if self.exit_status != 0:
            faults.append(f"the second worker ended with status {self.exit_status}")
        return faults


def check(
    puts: list[Put],
    rolled_back: int,
    runs: Counter[int],
    *,
    skipped: int,
    left_by_killed: int,
    seconds: float,
    exit_status: int | None,
) -> Outcome:
    """Compare what was put with what is there now."""
    status = dict(Job.objects.values_list("pk", "status"))
    words = dict(Note.objects.values_list("pk", "words"))
    gone = [put for put in puts if put.job_id not in status]
    # A job that left is done if it ran and its note was counted; else it is lost.
    done = [put for put in gone if runs[put.job_id] and words.get(put.note_id) is not None]
    failed = [put for put in puts if status.get(put.job_id) == "failed"]
    equal = sum(1 for put in done if words[put.note_id] == put.words)
    notes_left = set(words) - {put.note_id for put in puts}
    jobs_left = set(status) - {put.job_id for put in puts}
    return Outcome(
        puts=len(puts),
        rolled_back=rolled_back,
        left_by_rolled_back=len(notes_left) + len(jobs_left),
        skipped=skipped,
        left_by_killed=left_by_killed,
        done=len(done),
        run_twice=sum(1 for put in puts if runs[put.job_id] > 1),
        failed=len(failed),
        failed_otherwise=len({p.job_id for p in failed} ^ {p.job_id for p in puts if p.broken}),
        unfinished=len(puts) - len(gone) - len(failed),
        lost=len(gone) - len(done),
        equal=equal,
        different=len(done) - equal,
        seconds=seconds,
        exit_status=exit_status,
    )
