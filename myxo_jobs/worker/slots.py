"""Where jobs run: the threads of a topic, and the one event loop for all async ones."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from contextvars import Context
from queue import Empty, SimpleQueue

from asgiref.sync import sync_to_async

from myxo_jobs.handlers import Handler
from myxo_jobs.queue import Claim
from myxo_jobs.worker.connections import HandlerConnections
from myxo_jobs.worker.running import (
    FINAL_FAILURES,
    Outcome,
    Surroundings,
    not_to_run,
    run,
    run_async,
    see_off_apart,
    see_off_in_time,
    unstarted,
)

logger = logging.getLogger("myxo_jobs")

NO_THREAD_LOG_SECONDS = 10.0
# How long an async job without a thread for its queries is kept, not to spin.
GIVE_BACK_SECONDS = 0.5

Finish = Callable[[Outcome], None]


class Slots(ABC):
    """The slots of one topic, and the claims that wait for one."""

    _no_thread_told = -NO_THREAD_LOG_SECONDS

    @abstractmethod
    def add(self, claims: Iterable[Claim], in_hand: int) -> bool:
        """Take claims to run, in their order; tell whether somebody is there to run them.

        `in_hand`: how many have not ended, with these.
        """

    @abstractmethod
    def resize(self, size: int) -> None:
        """Run so many jobs at once from now on; those that run go on."""

    @abstractmethod
    def waiting(self) -> int:
        """Return how many claims have not been started."""

    @abstractmethod
    def take_back(self) -> list[Claim]:
        """Return the claims that have not been started; they will not be."""

    @abstractmethod
    def stop(self) -> None:
        """Let every slot end when it is free."""

    @abstractmethod
    def join(self, deadline: float) -> None:
        """Wait for the slots to end, until a moment of the monotonic clock."""

    def _tell_of_no_thread(self, topic: str, error: RuntimeError) -> None:
        now = time.monotonic()
        if now - self._no_thread_told >= NO_THREAD_LOG_SECONDS:
            self._no_thread_told = now
            logger.warning("topic=%s cannot start a thread, tries on: %s", topic, error)


class ThreadSlots(Slots):
    """Threads, started as they are needed, that each run one job at a time."""

    def __init__(self, handler: Handler, around: Surroundings, finish: Finish) -> None:
        self._handler = handler
        self._size = handler.workers
        self._around = around
        self._finish = finish
        self._claims: SimpleQueue[Claim | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def add(self, claims: Iterable[Claim], in_hand: int) -> bool:
        for claim in claims:
            self._claims.put(claim)
        while len(self._threads) < min(in_hand, self._size):
            thread = threading.Thread(
                target=self._serve,
                name=f"myxo_jobs {self._handler.topic} {len(self._threads) + 1}",
                daemon=True,
            )
            try:
                thread.start()
            except RuntimeError as error:  # the system has no more for this user
                self._tell_of_no_thread(self._handler.topic, error)
                break
            self._threads.append(thread)
        return bool(self._threads)

    def resize(self, size: int) -> None:
        self._size = size  # threads beyond it wait; a lane claims no more than so many

    def waiting(self) -> int:
        return self._claims.qsize()

    def take_back(self) -> list[Claim]:
        claims: list[Claim] = []
        while True:
            try:
                claim = self._claims.get_nowait()
            except Empty:
                return claims
            if claim is not None:
                claims.append(claim)

    def stop(self) -> None:
        for _ in self._threads:
            self._claims.put(None)

    def join(self, deadline: float) -> None:
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))

    def _serve(self) -> None:
        connections = HandlerConnections()
        try:
            while (claim := self._next(connections)) is not None:
                self._run(claim, connections)
        finally:
            connections.close()

    def _next(self, connections: HandlerConnections) -> Claim | None:
        try:
            return self._claims.get_nowait()
        except Empty:
            claim = self._claims.get()
            connections.freshen()
            return claim

    def _run(self, claim: Claim, connections: HandlerConnections) -> None:
        started = time.monotonic()
        outcome = not_to_run(claim, self._around, started)
        if outcome is None:
            with self._around.process:
                outcome = run(claim, self._around)
            outcome.seconds = time.monotonic() - started
        if outcome.verb in FINAL_FAILURES:
            connections.tidy()
            see_off_in_time(outcome, self._around)
            connections.tidy()
        elif outcome.seconds is not None:
            # Before anybody hears of the outcome: what the job left open may hold locks.
            connections.tidy()
        self._finish(outcome)


class EventLoop:
    """The worker's one event loop, in a thread of its own, and the connections of async jobs.

    Django's async ORM runs its queries in one thread for all of them (asgiref,
    thread-sensitive mode), so their connections are freshened when the first job
    starts and tidied when the last one ends.
    """

    loop: asyncio.AbstractEventLoop

    def __init__(self) -> None:
        self._thread = threading.Thread(
            target=self._serve, name="myxo_jobs event loop", daemon=True
        )
        self._connections: HandlerConnections | None = None
        self._running = 0
        self._gate = asyncio.Lock()

    def start(self) -> None:
        # Not sooner: its sockets would be shared with the processes forked meanwhile.
        self.loop = asyncio.new_event_loop()
        self._thread.start()

    async def enter(self) -> None:
        """Before a job. Raises RuntimeError where no thread can be started for its queries."""
        self._running += 1
        is_first = self._running == 1
        if is_first or self._gate.locked():
            async with self._gate:
                if is_first:
                    try:
                        await sync_to_async(self._freshen)()
                    except RuntimeError:  # the system has no thread for it
                        self._running -= 1
                        raise

    async def leave(self) -> None:
        """After a job."""
        self._running -= 1
        if self._running == 0:
            async with self._gate:
                await sync_to_async(self._tidy)()

    def stop(self, deadline: float) -> None:
        """End the loop and close its connections, by a moment of the monotonic clock."""
        ended = asyncio.run_coroutine_threadsafe(self._end(), self.loop)
        try:
            ended.result(max(deadline - time.monotonic(), 0.1))
        except TimeoutError:
            return  # a handler blocks the loop: its thread is a daemon's
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(max(deadline - time.monotonic(), 0.1))

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()

    async def _end(self) -> None:
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await sync_to_async(self._close)()

    def _freshen(self) -> None:
        if self._connections is None:
            self._connections = HandlerConnections()
        self._connections.freshen()

    def _tidy(self) -> None:
        if self._connections is not None:
            self._connections.tidy()

    def _close(self) -> None:
        if self._connections is not None:
            self._connections.close()


class AsyncSlots(Slots):
    """Tasks of the worker's event loop, so many at once."""

    def __init__(
        self, handler: Handler, around: Surroundings, finish: Finish, events: EventLoop
    ) -> None:
        self._size = handler.workers
        self._around = around
        self._finish = finish
        self._events = events
        self._claims: deque[Claim] = deque()
        self._running = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, claims: Iterable[Claim], in_hand: int) -> bool:
        self._claims.extend(claims)
        self._events.loop.call_soon_threadsafe(self._fill)
        return True

    def resize(self, size: int) -> None:
        self._size = size

    def waiting(self) -> int:
        return len(self._claims)

    def take_back(self) -> list[Claim]:
        claims = []
        while self._claims:
            try:
                claims.append(self._claims.popleft())
            except IndexError:  # the loop took the last one
                break
        return claims

    def stop(self) -> None:
        """Nothing is to end here: the event loop ends for all topics together."""

    def join(self, deadline: float) -> None:
        """As `stop`."""

    def _fill(self) -> None:
        while self._running < self._size:
            try:
                claim = self._claims.popleft()
            except IndexError:
                return
            self._running += 1
            task = self._events.loop.create_task(self._run(claim), context=Context())
            self._tasks.add(task)
            task.add_done_callback(self._left)

    async def _run(self, claim: Claim) -> None:
        try:
            await self._events.enter()
        except RuntimeError as error:
            self._tell_of_no_thread(claim.handler.topic, error)
            await asyncio.sleep(GIVE_BACK_SECONDS)
            self._finish(unstarted(claim))
            return
        started = time.monotonic()
        outcome = not_to_run(claim, self._around, started)
        if outcome is None:
            with self._around.process:
                outcome = await run_async(claim, self._around)
            outcome.seconds = time.monotonic() - started
        if outcome.verb in FINAL_FAILURES:
            # Not by the connections of all async jobs, which others may be using.
            await asyncio.to_thread(see_off_apart, outcome, self._around)
        await self._events.leave()
        self._finish(outcome)

    def _left(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._running -= 1
        self._fill()
