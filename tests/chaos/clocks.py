"""Faults of the workers' machine: too little processor time, and a clock that is wrong."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from random import Random

import msgspec

from tests.chaos.jobs import LEASE, RELAYED, Relay
from tests.chaos.leftovers import PREFIX, is_left_over, name_of, need
from tests.chaos.rig import POSTGRES, NotPossibleError, Rig, Tree, mixed_work
from tests.chaos.scenario import scenario
from tests.chaos.shims import preloaded

# Of one core, for workers and a busy loop: a tenth is left for the workers.
SHARE = 0.2


class Share:
    """A control group whose processes get so much of one core."""

    ROOTS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))

    def __init__(self, rig: Rig, what: str, share: float) -> None:
        need()
        _sweep(self.ROOTS)
        for root in self.ROOTS:
            self._path = root / name_of(what)
            with suppress(OSError):
                self._path.mkdir()
                rig.surroundings.callback(_remove, self._path)
                self._limit(share)
                return
        raise NotPossibleError("no control group limits the processor here")

    def _limit(self, share: float) -> None:
        micros = int(share * 100_000)
        if (self._path / "cpu.cfs_quota_us").exists():
            (self._path / "cpu.cfs_period_us").write_text("100000")
            (self._path / "cpu.cfs_quota_us").write_text(str(micros))
        else:
            (self._path / "cpu.max").write_text(f"{micros} 100000")

    def add(self, *pids: int) -> None:
        for pid in pids:
            (self._path / "cgroup.procs").write_text(str(pid))

    @property
    def throttled(self) -> int:
        """How often its processes had to wait since their share was used up."""
        words = (self._path / "cpu.stat").read_text().split()
        return int(words[words.index("nr_throttled") + 1])

    def lift(self) -> None:
        self._limit(100.0)


def _sweep(roots: tuple[Path, ...]) -> None:
    """Remove the groups that killed runs have left behind."""
    for root in roots:
        for path in root.glob(f"{PREFIX}-*"):
            if is_left_over(path.name):
                _remove(path)


def _remove(path: Path) -> None:
    """Remove a group; what still runs in it goes back to the group above."""
    for pid in (path / "cgroup.procs").read_text().split():
        with suppress(OSError):
            (path.parent / "cgroup.procs").write_text(pid)
    deadline = time.monotonic() + 5
    while path.exists() and time.monotonic() < deadline:
        with suppress(OSError):  # as long as somebody who was killed is still in it
            path.rmdir()
        time.sleep(0.01)


@scenario("F14", "a tenth of a core for a worker and its children, beside a busy loop")
def processors_are_busy(rig: Rig) -> None:
    shares = [Share(rig, "alone", SHARE), Share(rig, "supervised", SHARE)]
    trees = [rig.start_workers(), rig.start_workers(processes=2)]
    rig.put_steadily(rate=20.0, make=mixed_work)
    rig.warm_up()
    for share, tree in zip(shares, trees, strict=True):
        busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        rig.surroundings.callback(_end, busy)
        share.add(tree.pid, *tree.descendants(), busy.pid)
    for _ in rig.moments(1.0, 2.0):
        rig.measure_recovery(time.monotonic(), 5.0, "a look")
    rig.bites = sum(share.throttled for share in shares)
    for share in shares:
        share.lift()  # for the end of the run


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


@scenario("F18", "workers whose clocks are an hour ahead, an hour behind, and drift", (POSTGRES,))
def clocks_are_wrong(rig: Rig) -> None:
    shim = preloaded(rig, "wrong_clock")
    ahead = rig.start_workers(**shim, MYXO_CLOCK_OFFSET="3600")
    behind = rig.start_workers(processes=2, **shim, MYXO_CLOCK_OFFSET="-3600")
    rig.start_workers(**shim, MYXO_CLOCK_RATE="1.3")
    rig.put_steadily(rate=50.0, make=_delayed_work)
    rig.warm_up()
    early = {ahead.pid}
    for _ in rig.moments(2.0, 4.0):
        rig.kill(ahead.pid, within=LEASE + 2)
        ahead.wait(5)
        rig.restart(ahead)
        early.add(ahead.pid)
    rig.oracle.stop()
    time.sleep(3.0)  # until what was relayed is due
    rig.wait_until_drained()
    _check_delays(rig)
    _check_skew(rig, ahead, early, timedelta(hours=1))
    _check_skew(rig, behind, set(behind.workers()), -timedelta(hours=1))
    rig.bites = len(rig.ledger.lines("relay"))


def _check_skew(rig: Rig, tree: Tree, pids: set[int], skew: timedelta) -> None:
    """Check that a tree had a wrong clock, and ran jobs."""
    told = datetime.strptime(tree.log().splitlines()[-1][:19], "%Y-%m-%d %H:%M:%S")
    rig.expect(abs(told - datetime.now() - skew) < timedelta(minutes=2), f"the clock says {told}")
    rig.expect(any(line.pid in pids for line in rig.begun()), "a worker has run nothing")


def _delayed_work(number: int, chance: Random) -> msgspec.Struct:
    if number % 5 == 1:
        return Relay(number, chance.uniform(0.2, 2.0))
    return mixed_work(number, chance)


def _check_delays(rig: Rig) -> None:
    """Check that what the workers put with a delay began when it was due."""
    begun = {line.name: line.at for line in reversed(rig.begun())}
    last = {line.name: line for line in rig.ledger.lines("relay")}  # one that ran again counts once
    for line in last.values():
        at = begun.get(str(RELAYED + int(line.name)))
        if at is None:
            rig.violate(f"the job that {line.name} put did not run")
            continue
        late = at - line.at - line.value
        rig.expect(late > -0.01, f"a job began {-late:.2f} s before it was due")
        rig.expect(late < 1.5, f"a job began {late:.2f} s after it was due")
