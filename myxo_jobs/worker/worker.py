"""The worker's loop: settle what ended, claim what fits, wait for either; and its end."""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress

import msgspec
from django.db import DatabaseError, InterfaceError, OperationalError
from django.db.backends.base.base import BaseDatabaseWrapper

from myxo_jobs import queue
from myxo_jobs.conf import settings
from myxo_jobs.databases import OnSuspect, database_of
from myxo_jobs.handlers import Handler, registry
from myxo_jobs.queue import Claim, Tokens
from myxo_jobs.worker.board import Board
from myxo_jobs.worker.lanes import UNSTARTED_SECONDS, Lane
from myxo_jobs.worker.leases import LeaseKeeper, close_quietly
from myxo_jobs.worker.limits import TimeLimits, rss_mib
from myxo_jobs.worker.process import Leftovers, ProcessState
from myxo_jobs.worker.running import Outcome, Surroundings, see_off_apart, undo_apart, unstarted
from myxo_jobs.worker.settling import Settling
from myxo_jobs.worker.slots import AsyncSlots, EventLoop, Slots, ThreadSlots
from myxo_jobs.worker.suspects import Suspects, Writes
from myxo_jobs.worker.sweeping import Sweeper
from myxo_jobs.worker.waking import Waking

logger = logging.getLogger("myxo_jobs")

# Puts do not repeat a wake-up within a short window, so a worker that was woken, or
# found work, keeps looking for twice as long.
LOOK_ON_SECONDS = 2 * queue.WAKE_WINDOW_SECONDS
LOOK_ON_EVERY_SECONDS = 0.01
# Outcomes wait for others so long after a turn, and at most so long after they were last
# stored, while there is more to run.
SETTLE_SECONDS = 0.005
LONGEST_HELD_SECONDS = 0.05
# How soon the loop, after a statement, gets the interpreter back from handlers that keep
# it busy: Python's own 5 ms are as long as several statements.
SWITCH_SECONDS = 0.0005
OUTAGE_LOG_SECONDS = 10.0
# A topic whose claim the database refuses for its own sake is tried again after so long.
BROKEN_LANE_SECONDS = 10.0
RSS_EVERY_SECONDS = 1.0
# How often the dials of handlers that have some are read.
DIALS_EVERY_SECONDS = 2.0
# How often the database is asked whether it needs a person, and how long a person has.
COMPLAINT_EVERY_SECONDS = 5.0
COMPLAINT_TOLD_SECONDS = 600.0
# A run that should have ended by its timeout and the grace gets so much more before
# the supervisor ends its process.
OVERDUE_SECONDS = 2.0
OUTAGE_FIRST_PAUSE_SECONDS = 0.1
OUTAGE_LONGEST_PAUSE_SECONDS = 1.0


class Worker:
    """Takes, runs and settles the jobs of some topics, in threads of this process.

    `topics` and `exclude` choose among the topics with a handler; `workers` replaces
    each one's number of slots; `using` is the alias of the queue's database; with
    `drain` it stops by itself once nothing is due. `grace` and `poll` are seconds and
    default to the settings.

    After `max_jobs` jobs, above `max_rss` MiB of memory, and when a plain handler ran into
    its timeout, it is `worn`: it takes nothing more and ends, for a fresh process to go on.
    `board` and `watchdog` are for the process that it is alone in.

    Raises ImproperlyConfigured for a topic without handler.
    """

    # Whether it removes files that no row names: of a test's rows it must not be said.
    tidies = True

    def __init__(
        self,
        topics: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        workers: int | None = None,
        using: str | None = None,
        drain: bool = False,
        grace: float | None = None,
        poll: float | None = None,
        *,
        max_jobs: int | None = None,
        max_rss: float | None = None,
        board: Board | None = None,
        watchdog: bool = False,
    ) -> None:
        self.alias = using or queue.alias()
        self.drain = drain
        self.grace = settings().grace_seconds if grace is None else grace
        self.poll = settings().poll_seconds if poll is None else poll
        self.handlers = [
            msgspec.structs.replace(handler, workers=workers or handler.workers)
            for handler in registry.choose(topics, exclude).values()
        ]
        self.error: BaseException | None = None
        # Why this process should not go on, empty while it should.
        self.worn = ""
        # Runs that were interrupted, until their handler has left.
        self.timed_out: set[Claim] = set()
        self._has_interrupted = False
        self._suspects = Suspects()
        shortest_lease = min((handler.lease for handler in self.handlers), default=60.0)
        self._writes = Writes(shortest_lease)
        self._max_jobs = max_jobs
        self._max_rss = max_rss
        self._ended_jobs = 0
        self._complaint_after = 0.0
        self._workers = workers
        has_dials = any(handler.dials is not None for handler in self.handlers)
        self._dials_after = 0.0 if has_dials else math.inf
        self._rss_checked = 0.0
        self._board = board
        self._database = database_of(self.alias)
        self._tokens = Tokens()
        self._wake = threading.Event()
        self._stopping = False
        self._ended: deque[Outcome] = deque()
        # When the last turn ended, or outcomes were stored since; and when there was last
        # nothing left to store.
        self._turned = self._stored = 0.0
        # How long the loop has written in this turn, in seconds.
        self._wrote_for = 0.0
        self._keeper = LeaseKeeper(self.alias, shortest_lease, board)
        self._settling = Settling(self._keeper.release, self._see_off, self._drop)
        self._seen_off: deque[Outcome] = deque()
        self._waking = Waking(self.alias, self._on_wake)
        self._events = EventLoop()
        self._sweeper = Sweeper(self.alias, self.handlers, self._tokens.next, tidies=self.tidies)
        self._limits = TimeLimits(
            self._on_timeout, _tell_of_timeout, grace=self.grace, watchdog=watchdog
        )
        # Only where the process is its own: elsewhere others may have changed it on purpose.
        is_own = watchdog or board is not None
        self._process = ProcessState() if is_own else None
        self._leftovers = Leftovers(self._tokens.prefix) if is_own else None
        self._around = around = Surroundings(
            alias=self.alias,
            is_stopping=lambda: self._stopping or bool(self.worn),
            extend=self._keeper.extend,
            limits=self._limits,
            starts=self._on_start,
            process=self._process or nullcontext(),
        )
        self._lanes = {
            handler.topic: Lane(handler, self._slots(handler, around)) for handler in self.handlers
        }
        self._connection: BaseDatabaseWrapper | None = None
        self._next_look = self._looked_at = 0.0
        self._look_on_until = 0.0
        self._outage_since: float | None = None
        self._outage_pause = OUTAGE_FIRST_PAUSE_SECONDS
        self._outage_told = -OUTAGE_LOG_SECONDS
        self._thread = threading.Thread(target=self._serve, name="myxo_jobs worker", daemon=True)

    # -- from outside --------------------------------------------------------

    def start(self) -> None:
        """Start to work, in threads of this process; returns at once."""
        self._thread.start()

    def stop(self, grace: float | None = None) -> None:
        """Drain: finish what runs within the grace, give the rest back, and end.

        Raises what made the worker end, if something did.
        """
        if grace is not None:
            self.grace = grace
        self.request_stop()
        self.join()

    def request_stop(self) -> None:
        """Let the worker drain and end; returns at once. Safe in a signal handler."""
        if self._stopping:
            return  # a second signal may come inside the first one's `set`, which has locked
        self._stopping = True
        self._wake.set()

    def wear_out(self, reason: str) -> None:
        """Let the worker take nothing more and end, for a fresh process to go on."""
        if not self.worn:
            self.worn = reason
            logger.info("worker=%s is worn: %s", self._tokens.prefix, reason)
        self._wake.set()

    @property
    def was_stopped(self) -> bool:
        """Whether somebody asked it to stop."""
        return self._stopping

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the worker's end; tell whether it has ended. Raises what made it end."""
        if self._thread.ident is None:
            return True  # it was never started
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        if self.error is not None:
            raise self.error
        return True

    def __enter__(self) -> Worker:
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop()

    # -- the loop ------------------------------------------------------------

    def _serve(self) -> None:
        logger.info(
            "worker=%s started using=%s topics=%s",
            self._tokens.prefix,
            self.alias,
            ",".join(self._lanes),
        )
        if self._board is not None:
            self._board.introduce(self._tokens.prefix)
        switch_seconds = sys.getswitchinterval()
        if self._process is not None:
            sys.setswitchinterval(SWITCH_SECONDS)
        try:
            self._keeper.start()
            self._waking.start()
            self._events.start()
            self._sweeper.start()
            while not self._is_over():
                self._turn()
            self._drain()
        except BaseException as error:
            # Not an outage but a fault of this code: the process has to know.
            logger.exception("worker=%s ended by a fault", self._tokens.prefix)
            self.error = error
        finally:
            self._end()
            if self._process is not None:
                sys.setswitchinterval(switch_seconds)

    def _is_over(self) -> bool:
        if self._stopping or self.worn:
            return True
        idle = not any(
            lane.in_hand or (not lane.is_paused and (lane.may_find or lane.floors.in_doubt))
            for lane in self._lanes.values()
        )
        return (
            self.drain
            and idle
            and not self._ended
            and self._settling.is_empty()
            and self._outage_since is None
            and all(self._looked_at >= moment for moment in self._suspects_follow_at())
        )

    def _turn(self) -> None:
        self._wake.clear()
        began = time.monotonic()
        try:
            self._settle()
            self._check_wear()
            if self._leftovers is not None:
                self._leftovers.look(self._keeper.held)
            self._pass_on_complaint()
            self._return_late()
            self._turn_dials()
            self._look()
            self._claim()
            self._let_others_write()
        except (DatabaseError, InterfaceError) as error:
            self._note_outage(error, began)
            return
        self._note_contact(began)
        self._turned = time.monotonic()
        self._wake.wait(self._pause())

    def _pause(self) -> float:
        """Return how long the loop may wait, in seconds, if nothing wakes it."""
        if self._stopping or self.worn:
            return 0.0  # told since the turn began, and the wake-up was cleared then
        now = time.monotonic()
        moments = [self._next_look, self._dials_after]
        moments += [moment for moment in self._suspects_follow_at() if moment > now]
        for lane in self._lanes.values():
            if lane.may_find and self._room(lane, now):
                return 0.0
            if lane.may_find and lane.claims_after > now:
                moments.append(lane.claims_after)
            oldest = lane.oldest_unstarted()
            if oldest is not None:
                moments.append(oldest + UNSTARTED_SECONDS)
        to_store = self._settling.wait()
        if to_store is not None:
            moments.append(max(now + to_store, self._settles_at()))
        return max(min(moments) - now, 0.0)

    def _settle(self) -> None:
        self._take_in()
        began = time.monotonic()
        if began < self._settles_at():
            return
        if not self._settling.is_empty():
            self._settling.store(self._own())
            self._note_write(began)
        self._turned = self._stored = time.monotonic()

    def _settles_at(self) -> float:
        """Return from when on outcomes are stored: at once unless every topic has enough to run."""
        has_enough = all(lane.slots.waiting() > lane.low for lane in self._lanes.values())
        if not has_enough or self._stopping or self.worn:
            return 0.0
        return min(self._turned + SETTLE_SECONDS, self._stored + LONGEST_HELD_SECONDS)

    def _take_in(self) -> None:
        while self._seen_off:
            self._settling.add([self._seen_off.popleft()])
        by_topic: defaultdict[str, list[Outcome]] = defaultdict(list)
        while self._ended:
            outcome = self._ended.popleft()
            self._ended_jobs += 1
            self.timed_out.discard(outcome.claim)
            if self._suspects.ended(outcome.claim, ran=outcome.verb != "leave"):
                self._next_look = 0.0  # others may have waited for its end
            by_topic[outcome.claim.handler.topic].append(outcome)
        if self._leftovers is not None:
            self._leftovers.note(by_topic)
        for topic, outcomes in by_topic.items():
            self._lanes[topic].learn(outcomes)
            if self._lanes[topic].handler.limit is not None:
                self._lanes[topic].hopeful = True  # the limit has room again
            self._settling.add(outcomes)
        if self.drain and by_topic:
            for lane in self._lanes.values():
                lane.hopeful = True  # a job may have put others

    def _check_wear(self) -> None:
        if self._max_jobs and self._ended_jobs >= self._max_jobs:
            self.wear_out(f"{self._ended_jobs} jobs have ended (--max-jobs)")
        now = time.monotonic()
        # Not before it has run a job: a fresh process would be as large, and so on.
        if self._max_rss and self._ended_jobs and now - self._rss_checked > RSS_EVERY_SECONDS:
            self._rss_checked = now
            rss = rss_mib()
            if rss > self._max_rss:
                self.wear_out(f"{rss:.0f} MiB of memory are used (--max-rss)")

    def _pass_on_complaint(self) -> None:
        now = time.monotonic()
        if now < self._complaint_after:
            return
        self._complaint_after = now + COMPLAINT_EVERY_SECONDS
        try:
            complaint = self._database.complaint(self._own())
        except (OperationalError, InterfaceError):
            raise
        except DatabaseError:  # as for want of a right to read what it asks
            self._complaint_after = math.inf
            return
        if complaint:
            self._complaint_after = now + COMPLAINT_TOLD_SECONDS
            logger.warning("worker=%s warns of the database: %s", self._tokens.prefix, complaint)

    def _turn_dials(self) -> None:
        """Let what may be changed of handlers while they are served take effect."""
        now = time.monotonic()
        if now < self._dials_after:
            return
        self._dials_after = now + DIALS_EVERY_SECONDS
        before = [lane.handler for lane in self._lanes.values()]
        try:
            present = queue.present(self._own(), before)
        except (OperationalError, InterfaceError):
            self._dials_after = now
            raise
        except DatabaseError:
            logger.exception("worker=%s cannot read dials, goes on", self._tokens.prefix)
            return
        for was, handler in zip(before, present, strict=True):
            if handler is not was:
                self._turn_dial(handler)

    def _turn_dial(self, handler: Handler) -> None:
        size = handler.workers if handler.limit is None else handler.limit
        self._lanes[handler.topic].turn(handler, self._workers or size)
        for claim in self._keeper.held():
            if claim.handler.topic == handler.topic:
                # Its time to stay counts from its end, and as it is set then.
                claim.handler = msgspec.structs.replace(claim.handler, keep=handler.keep)

    def _return_late(self) -> None:
        for lane in self._lanes.values():
            self._give_back(lane.take_back_late())

    def _give_back(self, claims: Iterable[Claim]) -> None:
        """Give back claims that were not started."""
        for claim in claims:
            self._suspects.ended(claim, ran=False)
            self._settling.add([unstarted(claim)])

    def _look(self) -> None:
        """Ask once for all topics which have something due."""
        now = time.monotonic()
        others_may_follow = any(
            self._looked_at < moment <= now for moment in self._suspects_follow_at()
        )
        if now < self._next_look and not others_may_follow:
            return
        self._looked_at = now
        self._next_look = now + self.poll
        lanes = [lane for lane in self._lanes.values() if not lane.hopeful]
        if not lanes:
            return
        floors = {lane.handler.topic: lane.floors.at(now) for lane in lanes}
        found = self._database.look(self._own(), floors, self.poll)
        looked = time.monotonic()
        for lane in lanes:
            lane.floors.passed(floors[lane.handler.topic], [], began=now, ended=looked)
            wait = found.get(lane.handler.topic, math.inf)
            if wait <= 0:
                lane.hopeful = True
                if floors[lane.handler.topic] is None:
                    lane.floors.forget()  # what was found may stand before the floors
            else:
                self._look_in(wait, now)
                self._look_when_in_doubt(lane)
        if now < self._look_on_until:
            self._look_in(LOOK_ON_EVERY_SECONDS, now)

    def _look_in(self, seconds: float, now: float) -> None:
        self._next_look = min(self._next_look, now + seconds)

    def _look_when_in_doubt(self, lane: Lane) -> None:
        if lane.floors.in_doubt:
            self._next_look = min(self._next_look, lane.floors.full_at)

    def _claim(self) -> None:
        if self._board is not None and self._board.hears_of_suspects():
            for lane in self._lanes.values():
                lane.suspects_asked_at = lane.stopped_until = 0.0
        for lane in self._lanes.values():
            if self._stopping or self.worn:
                return
            began = time.monotonic()
            room = self._room(lane, began) if lane.may_find else 0
            if not room:
                continue
            on_suspect = self._on_suspect(lane, began)
            lane.hopeful = lane.woken = False  # before: a wake-up during it sets it again
            claims = self._claim_for(lane, room, began, on_suspect)
            if not claims:
                continue
            lane.hopeful = True
            self._look_on(began)
            if self._suspects.admit(claims[0], began):
                lane.take(claims)
            else:
                self._give_back(claims)

    def _room(self, lane: Lane, now: float) -> int:
        """Return how many jobs of a topic to claim now."""
        # Nothing is claimed ahead of suspects that follow one soon: their place is before it.
        follow = lane.found_suspect and now < self._suspects.next_at
        room = lane.room(now, suspects=follow or self._may_take_suspects(lane, now))
        if self._board is not None:
            room = min(room, self._board.room)
        if self._max_jobs is not None:
            in_hand = sum(lane.in_hand for lane in self._lanes.values())
            room = min(room, max(self._max_jobs - self._ended_jobs - in_hand, 0))
        return room

    def _claim_for(self, lane: Lane, room: int, now: float, on_suspect: OnSuspect) -> list[Claim]:
        connection = self._own()
        if self._board is not None:
            self._board.claiming(True)
        try:
            claims = queue.claim(
                connection,
                lane.handler,
                room,
                token=self._tokens.next(),
                on_suspect=on_suspect,
                # Suspects come one by one, and a claim that passes them by would move on.
                floors=None if lane.found_suspect else lane.floors,
            )
        except queue.LimitReached:
            if self._board is not None:
                self._board.claiming(False)
            return []
        except (OperationalError, InterfaceError):
            raise
        except DatabaseError:
            # Not an outage, but something in this topic's rows: the others go on.
            if self._board is not None:
                self._board.claiming(False)
            logger.exception("topic=%s cannot be claimed, tried again later", lane.handler.topic)
            lane.hopeful = True
            lane.claims_after = now + BROKEN_LANE_SECONDS
            return []
        if claims or on_suspect == "stop":
            self._note_write(now)
        self._keeper.hold(claims)
        if self._board is not None:
            self._board.claiming(False)
        if len(claims) < room:
            self._look_when_in_doubt(lane)
        self._note_suspects(lane, on_suspect, claims, now)
        return claims

    def _note_write(self, began: float) -> None:
        ended = time.monotonic()
        self._writes.add(began, ended)
        self._wrote_for += ended - began

    def _let_others_write(self) -> None:
        """Let others write after what this turn wrote, once its jobs are on their way."""
        if self._wrote_for:
            self._database.let_others_write(self._own(), self._wrote_for)
            self._wrote_for = 0.0

    def _note_suspects(
        self, lane: Lane, on_suspect: OnSuspect, claims: Sequence[Claim], now: float
    ) -> None:
        """Take note of what a claim tells of suspects: whether others follow, and when."""
        found_suspect = bool(claims) and claims[0].suspect
        if on_suspect == "stop" and not found_suspect:
            lane.stopped_until = self._writes.had_time_at()
            lane.hopeful = True  # until then, the next claim takes what stands behind them
        elif on_suspect != "skip":
            lane.found_suspect = found_suspect
            if not found_suspect:
                lane.suspects_asked_at = now

    def _on_suspect(self, lane: Lane, now: float) -> OnSuspect:
        if not lane.hopeful or not lane.has_free_slot() or not self._may_take_suspects(lane, now):
            return "skip"
        return "take" if self._writes.had_time(now) else "stop"

    def _suspects_follow_at(self) -> list[float]:
        """Return moments from which suspects can be claimed that could not before."""
        return [self._suspects.next_at, *(lane.stopped_until for lane in self._lanes.values())]

    def _may_take_suspects(self, lane: Lane, now: float) -> bool:
        # After an outage the living holders renew first: what looks expired then is
        # mostly theirs. And what looks expired may be our own, while it is not renewed.
        return (
            self._outage_since is None
            and now >= max(lane.suspects_after, lane.stopped_until)
            and self._keeper.holds_all()
            and self._suspects.may_claim(now)
        )

    def _own(self) -> BaseDatabaseWrapper:
        if self._connection is None:
            self._connection = self._database.open(self.alias)
        return self._connection

    # -- outages -------------------------------------------------------------

    def _note_outage(self, error: Exception, began: float) -> None:
        now = time.monotonic()
        if self._outage_since is None:
            self._outage_since = began
        if now - self._outage_told >= OUTAGE_LOG_SECONDS:
            self._outage_told = now
            logger.warning(
                "worker=%s cannot reach the database, tries on: %s",
                self._tokens.prefix,
                str(error).strip().partition("\n")[0],
            )
        if self._connection is not None:
            close_quietly(self._connection)
            self._connection = None
        for lane in self._lanes.values():
            lane.hopeful = True
        if self._stopping:
            time.sleep(OUTAGE_FIRST_PAUSE_SECONDS)
            return
        self._wake.wait(self._outage_pause)
        self._outage_pause = min(self._outage_pause * 2, OUTAGE_LONGEST_PAUSE_SECONDS)

    def _note_contact(self, began: float) -> None:
        """After statements that went through: take note of how long they could not."""
        now = time.monotonic()
        since = began if self._outage_since is None else self._outage_since
        for lane in self._lanes.values():
            if now - since > lane.handler.lease / 3:
                lane.suspects_after = now + lane.handler.lease / 3
        if self._outage_since is not None:
            logger.info("worker=%s reaches the database again", self._tokens.prefix)
            self._outage_since = None
            self._outage_pause = OUTAGE_FIRST_PAUSE_SECONDS

    # -- from the slots and the listener -------------------------------------

    def _slots(self, handler: Handler, around: Surroundings) -> Slots:
        if handler.is_async:
            return AsyncSlots(handler, around, self._finish, self._events)
        return ThreadSlots(handler, around, self._finish)

    def _finish(self, outcome: Outcome) -> None:
        """Take the outcome of a run; called in the thread that ran it."""
        self._ended.append(outcome)
        if self._wake.is_set():
            return
        lane = self._lanes[outcome.claim.handler.topic]
        if lane.slots.waiting() <= lane.low or time.monotonic() - self._turned > SETTLE_SECONDS:
            self._wake.set()

    def _see_off(self, outcome: Outcome) -> None:
        """See off a job that fails since it was cancelled, which its run did not know.

        In a thread of its own, since that is the project's code.
        """
        thread = threading.Thread(
            target=self._see_off_and_return, args=(outcome,), name="myxo_jobs cleanup", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # the system has no more for this user
            queue.tell(logging.ERROR, outcome.claim, "is not cleaned up: %s", error)
            outcome.cleaned = False
            self._seen_off.append(outcome)

    def _see_off_and_return(self, outcome: Outcome) -> None:
        try:
            see_off_apart(outcome, self._around)
        finally:
            self._seen_off.append(outcome)
            self._wake.set()

    def _drop(self, outcome: Outcome) -> None:
        """Undo what a run has stored elsewhere, whose outcome came too late.

        In a thread of its own, since that may take long; what it leaves out, the sweep does.
        """
        undo = outcome.claim.handler.undo
        if undo is None or outcome.verb != "keep":
            return
        thread = threading.Thread(
            target=undo_apart, args=(undo, outcome, self.alias), name="myxo_jobs undo", daemon=True
        )
        with suppress(RuntimeError):  # the system has no more threads for this user
            thread.start()

    def _on_start(self, claim: Claim) -> None:
        """Take note of a run that begins; called in the thread that runs it."""
        if self._board is not None:
            timeout = claim.handler.timeout
            overdue_at = math.inf
            if timeout is not None:
                overdue_at = time.monotonic() + timeout + self.grace + OVERDUE_SECONDS
            self._board.start(claim, overdue_at)

    def _on_timeout(self, claim: Claim) -> None:
        """Take note of a run that is about to be interrupted; called in the limits' thread.

        Logs nothing: a log can be slow, and this must not be.
        """
        self.timed_out.add(claim)
        if self._board is not None:
            self._board.interrupt(claim)
        self._has_interrupted = True
        self.worn = self.worn or f"a run of {claim.handler.topic} was interrupted"
        self._wake.set()

    def _on_wake(self, topics: set[str] | None) -> None:
        """Take a wake-up; called in the listener's thread."""
        if topics is None:
            self._next_look = 0.0
        else:
            woken = self._lanes.keys() & topics
            if not woken:
                return
            for topic in woken:
                self._lanes[topic].woken = True
            self._look_on(time.monotonic())
        self._wake.set()

    def _look_on(self, now: float) -> None:
        if self._database.sends_wakeups:
            self._look_on_until = now + LOOK_ON_SECONDS
            self._look_in(LOOK_ON_EVERY_SECONDS, now)

    # -- the end -------------------------------------------------------------

    def _drain(self) -> None:
        """Give back what has not started, and finish what runs within the grace."""
        deadline = math.inf
        while True:
            self._wake.clear()
            # A worker that is only worn lets its jobs end, however long they take.
            if deadline == math.inf and (self._stopping or self._has_interrupted):
                deadline = time.monotonic() + self.grace
                logger.info("worker=%s drains grace=%gs", self._tokens.prefix, self.grace)
            for lane in self._lanes.values():
                self._give_back(lane.take_back())
            began = time.monotonic()
            try:
                self._settle()
            except (DatabaseError, InterfaceError) as error:
                self._note_outage(error, began)
            in_hand = any(lane.in_hand for lane in self._lanes.values())
            if not in_hand and not self._ended and self._settling.is_empty():
                return
            left = deadline - time.monotonic()
            if left <= 0:
                self._abandon()
                return
            to_store = self._settling.wait()
            wait = left if to_store is None else min(left, to_store)
            self._wake.wait(None if wait == math.inf else wait)

    def _abandon(self) -> None:
        """Give back what still runs: its handlers are left behind, their outcomes dropped.

        Not the runs that timed out: their attempt counts, once their process has ended.
        """
        self._take_in()
        left_alone = self._settling.claims() | self.timed_out
        left = [claim for claim in self._keeper.held() if claim not in left_alone]
        self._settling.add(Outcome(claim, "give_back") for claim in left)
        try:
            self._settling.store(self._own())
        except (DatabaseError, InterfaceError) as error:
            self._note_outage(error, time.monotonic())

    def _end(self) -> None:
        deadline = time.monotonic() + 1.0
        for lane in self._lanes.values():
            lane.slots.stop()
        self._events.stop(deadline)
        for lane in self._lanes.values():
            lane.slots.join(deadline)
        self._limits.stop()
        self._sweeper.stop(max(deadline - time.monotonic(), 0.1))
        if self._process is not None:
            self._process.set_back()  # a relative path starts the process that replaces it
        self._waking.stop()
        self._keeper.stop()
        if self._connection is not None:
            close_quietly(self._connection)
        logger.info("worker=%s stopped", self._tokens.prefix)


def _tell_of_timeout(claim: Claim) -> None:
    queue.tell(logging.WARNING, claim, "timed out after %gs", claim.handler.timeout)
