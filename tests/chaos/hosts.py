"""Faults between hosts: workers in network namespaces, a server in another one."""

from __future__ import annotations

import statistics
import time
from itertools import pairwise
from random import Random

import msgspec
import psycopg

from myxo_jobs import Jobs
from tests.chaos.jobs import LEASE, Long, Relay, Stale, Work
from tests.chaos.network import Host, Network, counts_of
from tests.chaos.rig import POSTGRES, Loss, Rig, Tree, short_work
from tests.chaos.scenario import scenario
from tests.chaos.wire import Wire

# A session that the network has silently cut off is given up within so long.
DEAD_SECONDS = 15.0
# A suspect starts so long after the one before it, at the most here.
HEAD_START_SECONDS = 1.0
POLL_SECONDS = 1.0
PROMPT_SECONDS = 0.1  # what a wake-up takes, on a busy machine
LISTEN_AGAIN_SECONDS = 30.0
ROUND_TRIP_SECONDS = 0.1  # over a bad link
MANY = 1_000


@scenario("F15", "a host cut off without a word for longer than a lease, then healed", (POSTGRES,))
def hosts_are_cut_off(rig: Rig) -> None:
    network = Network(rig, hosts=3)
    network.join()
    one, two, three = network.hosts
    trees = [
        network.start_workers(one),
        network.start_workers(two, processes=2),
        network.start_workers(three, advised=False),
    ]
    rig.put_steadily(rate=30.0, make=_stale_work)
    rig.warm_up()
    rig.bites = 0
    for _ in rig.moments(1.0, 2.0):
        place = rig.random.randrange(len(trees))
        advised = network.hosts[place] is not three
        _cut_off(rig, network, network.hosts[place], trees[place], advised=advised)


def _stale_work(number: int, chance: Random) -> msgspec.Struct:
    if number % 10 == 0:
        return Relay(number, 0.0)
    if number % 3 == 0:
        return Stale(number, chance.choice(["returns", "raises"]), "returns", 0.5)
    return short_work(number, chance)


def _cut_off(rig: Rig, network: Network, host: Host, tree: Tree, *, advised: bool) -> None:
    """Cut a host off until its sessions are dead, and look what becomes of its jobs.

    Without the advised options the sessions of its handlers do not notice.
    """
    told = tree.log().count("cannot reach the database")
    again = tree.log().count("reaches the database again")
    pids = {tree.pid, *tree.workers()}
    _give_it_a_long_job(rig, pids)
    sessions = host.sessions()
    since = time.monotonic()
    with network.cut(host):
        rig.wait_until(
            lambda: tree.log().count("cannot reach the database") >= told + tree.processes,
            because="the worker knows that it is cut off", within=DEAD_SECONDS,
        )  # fmt: skip
        if advised:
            rig.wait_until(
                lambda: not host.sessions() & sessions,
                because="all sessions of the host are given up",
                within=max(since + DEAD_SECONDS - time.monotonic(), 0.0),
            )
            rig.notes.append(f"sessions given up after {time.monotonic() - since:.1f} s")
        time.sleep(max(since + DEAD_SECONDS + rig.random.uniform(0, 5) - time.monotonic(), 0.0))
    healed_at = time.monotonic()
    rig.wait_until(
        lambda: tree.log().count("reaches the database again") >= again + tree.processes,
        because="the healed host reaches the database", within=DEAD_SECONDS,
    )  # fmt: skip
    rig.wait_until(
        lambda: any(line.pid in pids and line.at > healed_at for line in rig.begun()),
        because="the healed host works again",
    )
    rig.recoveries.append(time.monotonic() - healed_at)
    rig.losses += [Loss("stop", pid, since, time.monotonic()) for pid in pids]
    _check_passed_on(rig, pids, since, healed_at)


def _give_it_a_long_job(rig: Rig, pids: set[int]) -> None:
    """Put jobs that outlast a lease, until one of these processes runs one."""
    numbers: set[str] = set()
    while not any(line.name in numbers and line.pid in pids for line in rig.begun()):
        request = Long(rig.oracle.number(), LEASE * rig.random.uniform(2.0, 4.0))
        numbers.add(str(request.number))
        rig.oracle.put(request)
        time.sleep(0.2)


def _check_passed_on(rig: Rig, pids: set[int], since: float, healed_at: float) -> None:
    """Check that what a host had claimed was run elsewhere while it was cut off."""
    from tests.chaos.invariants import runs_of

    began_again = []
    for runs in runs_of(rig.ledger.lines()).values():
        for run, following in pairwise(runs):
            if run.pid in pids and since < run.ended and since < following.begun < healed_at:
                if run.how == "raise" and run.ended <= following.begun:
                    continue
                began_again.append(following.begun - since)
                rig.expect(following.pid not in pids, f"the host that is cut off has run {runs}")
                # Its outcome came to a claim that was another's: it had to be refused.
                rig.bites = (rig.bites or 0) + (run.ended > following.begun)
    rig.expect(bool(began_again), "no job of the host that was cut off ran elsewhere")
    if began_again:
        first, last = min(began_again), max(began_again)
        most = LEASE + 2 + HEAD_START_SECONDS * len(began_again)
        rig.expect(first <= LEASE + 2, f"the first job passed on after {first:.1f} s")
        rig.expect(last <= most, f"the last of {len(began_again)} passed on after {last:.1f} s")
        rig.recoveries.append(first)


@scenario("F16", "a slow, lossy, reordering link between workers and server", (POSTGRES,))
def links_are_bad(rig: Rig) -> None:
    network = Network(rig, hosts=3)
    wires = network.join_by_wires(
        Wire(delay=ROUND_TRIP_SECONDS / 2, jitter=0.03, loss=0.02, seed=rig.seed)
    )
    for host in network.hosts[:2]:
        network.start_workers(host)
    network.start_workers(network.hosts[2], processes=2)
    rig.put_steadily(rate=60.0)
    rig.warm_up()
    for _ in rig.moments(0.5, 1.0):
        rig.measure_recovery(time.monotonic(), 5.0, "a look")
    rig.bites = sum(one.lost + one.overtaken for one in map(counts_of, wires))
    rig.notes.append(f"median wait {statistics.median(_waits(rig)):.2f} s")
    rig.oracle.stop()
    rig.wait_until_drained()
    began = time.monotonic()
    Jobs().put_many(Work(rig.oracle.number()) for _ in range(MANY))
    rig.wait_until_drained()
    # Four processes that claim and complete one at a time get so many done in a round trip.
    at_most = MANY / (4 / 2) * ROUND_TRIP_SECONDS
    took = time.monotonic() - began
    rig.notes.append(f"{MANY} jobs in {took:.1f} s")
    rig.expect(took < at_most / 2, f"{MANY} jobs took {took:.1f} s, as if one at a time")


def _waits(rig: Rig) -> list[float]:
    """Return how long each acknowledged put has waited for its first begin."""
    first = {line.job: line.at for line in reversed(rig.begun())}
    return [first[put.job_id] - put.at for put in rig.oracle.puts if put.job_id in first]


@scenario("F17", "a LISTEN session whose packets alone vanish", (POSTGRES,))
def wake_ups_vanish(rig: Rig) -> None:
    network = Network(rig, hosts=1)
    network.join()
    host = network.hosts[0]
    network.start_workers(host)
    rig.warm_up()
    rig.bites = 0
    _expect_wake_ups(rig)
    for _ in rig.moments(0.5, 1.0):
        ports = _listening_ports(rig)
        since = time.monotonic()
        with network.cut(host, max(ports)):
            deaf = []
            while _listening_ports(rig) <= ports:
                deaf.append(_wait_of_a_put(rig))
                if time.monotonic() - since > LISTEN_AGAIN_SECONDS:
                    rig.violate(f"nobody listens again after {LISTEN_AGAIN_SECONDS:g} s")
                    break
            rig.recoveries.append(time.monotonic() - since)
            rig.bites += sum(wait > PROMPT_SECONDS for wait in deaf)
            rig.expect(
                max(deaf) < POLL_SECONDS + 0.5, f"a job waited {max(deaf):.1f} s without wake-ups"
            )
            _expect_wake_ups(rig)


def _expect_wake_ups(rig: Rig) -> None:
    """Check that an idle worker begins a job at once."""
    waits = [_wait_of_a_put(rig) for _ in range(5)]
    median = statistics.median(waits)
    rig.expect(median < PROMPT_SECONDS, f"jobs wait {median:.2f} s in spite of wake-ups")


def _wait_of_a_put(rig: Rig) -> float:
    """Put a job for a worker that has nothing to do; return how long it waited."""
    time.sleep(rig.random.uniform(0.3, 0.8))
    put = rig.oracle.put(Work(rig.oracle.number()))
    found = rig.wait_until(
        lambda: [line.at for line in rig.begun() if line.job == put.job_id],
        because="a job begins",
    )
    return found[0] - put.at if found else float("inf")


def _listening_ports(rig: Rig) -> set[int]:
    """Return the clients' ports of the sessions that listen, also of those that are dead."""
    with psycopg.connect(rig.server.url) as admin:
        rows = admin.execute(
            "SELECT client_port FROM pg_stat_activity WHERE query LIKE 'LISTEN%%'"
        ).fetchall()
    return {row[0] for row in rows}
