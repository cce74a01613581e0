"""Faults of services: what a person starts, watches and fetches."""

from __future__ import annotations

import hashlib
import http.client
import json
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from html import unescape
from html.parser import HTMLParser
from itertools import cycle
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from myxo_jobs import PayloadInvalid
from myxo_jobs.services import delete_job, enqueue, get_job, job_document
from tests.chaos import zoo
from tests.chaos.disks import FULL, Disk
from tests.chaos.invariants import runs_of
from tests.chaos.jobs import LEASE
from tests.chaos.people import Person
from tests.chaos.rig import Rig, Tree
from tests.chaos.scenario import scenario
from tests.chaos.site import Answer, Site

if TYPE_CHECKING:
    from myxo_jobs.services.rows import ServiceJob

# Workers that know the services.
KNOWING = {"MYXO_CHAOS_SERVICES": "1"}
MIB = 2**20


def _start(rig: Rig, **environment: str) -> list[Tree]:
    """Start workers that know the services, and know them here, too."""
    import tests.chaos.services  # noqa: F401

    (rig.folder / "files").mkdir(exist_ok=True)
    more = KNOWING | environment
    return [rig.start_workers(**more), rig.start_workers(processes=2, **more)]


def _ended(rig: Rig, uid: str, within: float = 20.0) -> ServiceJob | None:
    def look() -> ServiceJob | None:
        job = get_job(uid)
        return job if job is not None and job.status in ("done", "failed") else None

    return rig.wait_until(look, because=f"the job {uid} has ended", within=within)


def _files(rig: Rig) -> set[str]:
    """Return the names of all files in the storage."""
    root = rig.folder / "files"
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


# -- stopped --------------------------------------------------------------------------


@scenario("F4-services", "SIGSTOP of a worker for longer than its lease while it runs a service")
def services_are_stopped(rig: Rig) -> None:
    trees = _start(rig)
    rig.put_steadily(rate=15.0)
    rig.warm_up()
    uids = []
    for _ in rig.moments(0.1, 0.5):
        for _ in range(4):
            paper = {
                "first": rig.random.choice(["returns", "returns", "raises"]),
                "then": rig.random.choice(["returns", "returns", "raises"]),
                "first_seconds": rig.random.uniform(0.2, 1.0),
                "then_seconds": rig.random.choice([0.0, 0.5, 2.0]),
                "may_fail": True,
            }
            uids.append(rig.oracle.enqueue("chaos-paper", paper))
        time.sleep(rig.random.uniform(0.1, 0.4))
        rig.pause(_busiest(rig, trees), LEASE * rig.random.uniform(1.2, 2.2))
    rig.wait_until_drained()
    rig.wait_until(
        lambda: all(run.how for runs in runs_of(rig.ledger.lines()).values() for run in runs),
        because="the late runs come to their ends",
        within=30,
    )
    _check_papers(rig, uids)


def _busiest(rig: Rig, trees: list[Tree]) -> int:
    """Return the worker process that runs the most jobs of services."""
    papers = {line.job for line in rig.ledger.lines("mark")}
    running: Counter[int] = Counter({pid: 0 for tree in trees for pid in tree.workers()})
    for job, runs in runs_of(rig.ledger.lines()).items():
        running.update(run.pid for run in runs if job in papers and not run.how)
    return running.most_common(1)[0][0]


def _check_papers(rig: Rig, uids: list[str]) -> None:
    """Check that all that is left of each job is of the run that won, the last."""
    marks: defaultdict[int, dict[int, str]] = defaultdict(dict)
    for line in rig.ledger.lines("mark"):
        marks[line.job][line.attempt] = line.value
    jobs = [job for job in map(get_job, uids) if job is not None]
    rig.expect(len(jobs) == len(uids), "a job of a service is gone")
    for job in jobs:
        mark = marks[job.pk].get(job.attempts)
        rig.expect(max(marks[job.pk]) == job.attempts, f"I6 a later run than {job.attempts} began")
        if job.status == "done":
            result = job.result or {}
            left = {"result": result.get("mark"), "file": _content(rig, result.get("file", ""))}
        else:
            left = {"message": job.message, "error": job.error.rpartition(" ")[2]}
        left["progress"] = job.progress_note
        wrong = {name: value for name, value in left.items() if value != mark}
        rig.expect(not wrong, f"I6 job {job.pk}, {job.status} by {mark}, has {wrong}")
    recorded = {job.result["file"] for job in jobs if job.status == "done"}
    rig.wait_until(
        lambda: _files(rig) == recorded,
        because="no file stays but those of done jobs",
        within=15,
    )
    late = _late_runs(rig, {job.pk for job in jobs})
    rig.bites = late
    rig.notes.append(f"{late} runs of services ended after a later one had begun")
    stray = len(_files(rig) - recorded)
    rig.expect(stray == 0, f"{stray} files of runs that lost stay")


def _content(rig: Rig, name: str) -> str:
    """Return the mark that a file is full of."""
    path = rig.folder / "files" / name
    text = path.read_text() if path.is_file() else ""
    return text[:16] if text == text[:16] * 10 else f"{name}: {text}"


def _late_runs(rig: Rig, jobs: set[int]) -> int:
    return sum(
        any(run.begun < other.begun < run.ended for other in runs)
        for job, runs in runs_of(rig.ledger.lines()).items()
        if job in jobs
        for run in runs
    )


# -- full disks -----------------------------------------------------------------------


@scenario("F12-services", "the disk of services' files full, or the one they write on before")
def file_disks_are_full(rig: Rig) -> None:
    disks = {"storage": Disk(rig, "storage", 12), "temporary": Disk(rig, "temporary", 12)}
    (rig.folder / "files").symlink_to(disks["storage"].folder)
    trees = _start(rig, MYXO_CHAOS_TEMP=str(disks["temporary"].folder))
    rig.put_steadily(rate=20.0)
    rig.warm_up()
    rig.bites = 0
    places = cycle(disks.items())
    for _ in rig.moments(0.1, 0.5):
        place, disk = next(places)
        disk.fill(but_kib=rig.random.choice([0, 64, 1024]))
        full = rig.oracle.enqueue("chaos-large", {"mib": 3, "may_fail": True})
        _check_failed_for_space(rig, _ended(rig, full), place)
        for folder in (one.folder for one in disks.values()):
            rig.wait_until(
                lambda folder=folder: not any(p.is_file() for p in folder.rglob("*")),
                because=f"nothing half stays of {full} in {folder}",
            )
        small = _ended(rig, rig.oracle.enqueue("chaos-large", {"mib": 0}))
        rig.expect(small is not None and small.status == "done", "a job without a file failed")
        disk.free()
        freed_at = time.monotonic()
        fits = _ended(rig, rig.oracle.enqueue("chaos-large", {"mib": 3}))
        rig.recoveries.append(time.monotonic() - freed_at)
        size = 3 * MIB
        well = fits is not None and fits.status == "done" and fits.bytes_out == size
        rig.expect(well, f"{place}: with space again it ended as {fits and fits.error}")
        if fits is not None:
            delete_job(fits.uid)
            rig.discarded.add(fits.pk)
    met = sum(tree.log().count(FULL) for tree in trees)
    rig.expect(met > 0, "no worker has met the full disk")


def _check_failed_for_space(rig: Rig, job: ServiceJob | None, place: str) -> None:
    if job is None:
        return
    document = job_document(job)
    told = json.dumps(document)
    rig.expect(
        (job.status, job.reason, job.attempts) == ("failed", "error", 2) and FULL in job.error,
        f"{place} full: {job.status}, {job.reason}, {job.attempts} attempts, {job.error!r}",
    )
    rig.expect(
        document["status"] == "failed"
        and str(job.uid)[-12:] in document["message"]
        and document["file"] is document["download_url"] is None,
        f"{place} full: the owner is told {told}",
    )
    rig.expect("Errno" not in told and "space" not in told, f"the owner is told too much: {told}")
    rig.bite()


# -- huge -----------------------------------------------------------------------------

MOST_GROWTH_MIB = 40
DOWNLOAD_MIB = 100
LISTED = 30


@scenario("F33-services", "services whose payload, result, progress, errors and files are huge")
def services_are_huge(rig: Rig) -> None:
    trees = _start(rig)
    site = Site(rig)
    rig.put_steadily(rate=15.0)
    rig.warm_up()
    rig.levels = {}  # they hold what is too large until it is refused
    rig.bites = 0
    large = rig.oracle.enqueue("chaos-large", {"mib": DOWNLOAD_MIB}, **site.ada.owner)
    noise = rig.oracle.enqueue(
        "chaos-noise", {"where": "log", "size": 0, "may_fail": True}, **site.ada.owner
    )
    sizes = {size: list(HUGE) for size in (1_100_000, 10_000_000)} | {100_000_000: ["result"]}
    tries = [(where, size) for size, places in sizes.items() for where in places]
    for place, _ in enumerate(rig.moments(0.05, 0.2)):
        where, size = tries[place % (len(tries) if place < len(tries) else len(HUGE))]
        _try_huge(rig, where, size, site.ada)
    _check_noise(rig, _ended(rig, noise, within=60))
    for tree in trees:
        longest = max(map(len, tree.log().splitlines()))
        rig.expect(longest < 20_000, f"a line of the log has {longest:,} characters")
    _check_lists(rig, site)
    job = _ended(rig, large, within=60)
    if job is not None:
        _check_download(rig, site, job)


# What may be huge, and what is then left of it in the row.
HUGE = ("payload", "result", "note", "number", "error", "message")
MOST = {"error": 2_000, "traceback": 16 * 1024, "message": 2_000, "progress_note": 255}


def _try_huge(rig: Rig, where: str, size: int, ada: Person) -> None:
    if where == "payload":
        try:
            enqueue("chaos-huge", {"number": 0, "where": "", "size": 0, "text": "x" * size})
            rig.violate(f"a payload of {size:,} characters was put")
        except PayloadInvalid as error:
            told = re.search(r"has ([\d,]+) bytes, .* allows 1,048,576;.*'text'", str(error))
            well = told is not None and int(told[1].replace(",", "")) > size
            rig.expect(well, f"the sizes are not told: {str(error)[:300]}")
            rig.bite()
        return
    if where == "number":
        size = min(size, 10_000)
    huge = {"where": where, "size": size, "may_fail": where != "note"}
    job = _ended(rig, rig.oracle.enqueue("chaos-huge", huge, **ada.owner), within=60)
    if job is None:
        return
    rig.bite()
    lengths = {name: len(getattr(job, name) or "") for name in MOST}
    too_long = {name: length for name, length in lengths.items() if length > MOST[name]}
    rig.expect(not too_long, f"{where} of {size:,}: {too_long}")
    wanted = "done" if where == "note" else "failed"
    rig.expect(job.status == wanted, f"{where} of {size:,} ended as {job.status}: {job.error}")
    if where == "result":
        told = re.search(r"has ([\d,]+) bytes, 1,048,576 are allowed; .*\['rows'\]", job.error)
        rig.expect(told is not None and job.attempts == 1, f"the sizes are not told: {job.error}")
        rig.expect(job.result is None, "a huge result was stored")
    if where == "note":
        numbers = (job.progress_done, job.progress_total, job.progress_note)
        rig.expect(numbers == (1e308, 1.7e308, "n" * 255), f"progress of {numbers}")


def _check_noise(rig: Rig, job: ServiceJob | None) -> None:
    if job is not None:
        kept = json.loads(job.attempt_log or "[]")
        well = job.attempts == 30 and len(kept) == 20 and len(job.attempt_log) < 20 * 20_000
        rig.expect(well, f"an attempt log of {len(kept)} and {len(job.attempt_log or ''):,}")
        rig.bite()


def _check_lists(rig: Rig, site: Site) -> None:
    """Check that no list reads the payloads and results of jobs that have the longest."""
    from myxo_jobs.models import Job
    from myxo_jobs.queue import uuid7

    done = Job.objects.filter(topic="chaos-large", result__isnull=False).first()
    assert done is not None
    long = json.dumps({"number": 0, "long": "x" * 1_000_000})
    rows = [
        Job(
            **site.ada.owner,
            topic="chaos-huge",
            payload=long,
            result=long,
            attempt_log=json.dumps([{"traceback": "x" * 300_000}]),
            traceback="x" * 16_000,
            message="x" * 2_000,
            uid=uuid7(),
            due=None,
            completed_at=done.completed_at,
            expires_at=done.expires_at,
        )
        for _ in range(LISTED)
    ]
    for row in rows:
        row.save(force_insert=True)
    lists = ("/jobs/", "/own/?kind=chaos-huge", "/admin/myxo_jobs/job/")
    for address in lists:
        site.page(site.root if "admin" in address else site.ada, address)
    site.forget_peak()
    before = site.peak_mib()
    for address in lists:
        answer = site.page(site.root if "admin" in address else site.ada, address)
        shown = answer.text.count("<li>") + answer.text.count("action-select")
        well = answer.status == 200 and shown >= 20 and len(answer.body) < 200_000
        rig.expect(well, f"{address}: {answer.status}, {len(answer.body):,} bytes, {shown} jobs")
    grown = site.peak_mib() - before
    rig.expect(grown < MOST_GROWTH_MIB / 2, f"the lists of {LISTED} jobs took {grown:.0f} MiB")
    rig.notes.append(f"lists of {LISTED} long jobs took {grown:.1f} MiB")
    rig.discarded |= {row.pk for row in rows}
    Job.objects.filter(pk__in=[row.pk for row in rows]).delete()
    rig.bite()


def _check_download(rig: Rig, site: Site, job: ServiceJob) -> None:
    rig.expect(job.status == "done", f"a file of {DOWNLOAD_MIB} MiB: {job.error}")
    if job.status != "done":
        return
    path = rig.folder / "files" / job.result["file"]
    with path.open("rb") as file:
        wanted = _digest(iter(lambda: file.read(MIB), b""))
    site.ask(site.ada, f"/jobs/{job.uid}/download/", "HEAD")
    site.forget_peak()
    before = site.peak_mib()
    answer = site.open(site.ada, f"/jobs/{job.uid}/download/")
    got = _digest(_pieces(answer))
    grown = site.peak_mib() - before
    rig.expect(got == wanted == (DOWNLOAD_MIB * MIB, wanted[1]), f"{got} came of {wanted}")
    rig.expect(grown < MOST_GROWTH_MIB, f"a download took {grown:.0f} MiB")
    rig.notes.append(f"a download of {DOWNLOAD_MIB} MiB took {grown:.1f} MiB")
    rig.bite()


def _pieces(answer: http.client.HTTPResponse) -> Iterator[bytes]:
    while piece := answer.read(MIB):
        yield piece


def _digest(pieces: Iterator[bytes]) -> tuple[int, str]:
    size, digest = 0, hashlib.sha256()
    for piece in pieces:
        size += len(piece)
        digest.update(piece)
    return size, digest.hexdigest()


# -- texts that act -------------------------------------------------------------------

ENDS = ("returns", "gives up", "raises")
NO_UID = "01942000-0000-7000-8000-000000000001"
NOBODY = Person()


@scenario(
    "F53", "markup, code, terminal codes, formulas and paths in every text; strangers who ask"
)
def texts_act(rig: Rig) -> None:
    trees = _start(rig)
    site = Site(rig)
    rig.put_steadily(rate=15.0)
    rig.warm_up()
    rig.bites = 0
    owned = rig.folder / "owned"
    beasts = [(said, end) for end in ENDS for said in zoo.TEXTS.values()]
    for said, end in rig.random.sample(beasts, len(beasts)):
        code = zoo.code_that_touches(owned)
        payload = {"said": said, "end": end, "code": code, "may_fail": end != "returns"}
        name = {"preferred_name": said, **site.ada.owner}
        job = _ended(rig, rig.oracle.enqueue("chaos-beast", payload, **name))
        if job is None:
            continue
        _check_document(rig, site, job, payload)
        _check_pages(rig, site, job, said)
        if end == "returns":
            _check_sent(rig, site, job, said)
            _check_strangers(rig, site, job)
        rig.bite()
    _check_running(rig, site)
    rig.expect(not owned.exists(), "a payload was run as code")
    for tree in trees:
        acting = {one for one in tree.log() if not one.isprintable()} - {"\n", "\t"}
        rig.expect(not acting, f"the log has {sorted(acting)}")
        forged = re.findall(r"^2026-01-01 .*", tree.log(), re.MULTILINE)
        rig.expect(not forged, f"the log has a line of a stranger's: {forged[:1]}")


def _stored(said: str) -> str:
    """Return a text as a column of text has it."""
    return said.replace("\0", "\ufffd")


def _check_document(rig: Rig, site: Site, job: ServiceJob, payload: dict[str, Any]) -> None:
    said, end = payload["said"], payload["end"]
    rig.expect(
        job.status == ("done" if end == "returns" else "failed"),
        f"{said!r} {end} ended as {job.status}: {job.error}",
    )
    answer = site.ask(site.ada, f"/jobs/{job.uid}/")
    kinds = (answer.header("Content-Type"), answer.header("X-Content-Type-Options"))
    rig.expect(kinds == ("application/json", "nosniff"), f"the document is told as {kinds}")
    rig.expect("\x1b" not in answer.text, "a document with a terminal's code in it")
    document = answer.json()
    rig.expect(document["progress"]["note"] == _stored(said), f"another note than {said!r}")
    rig.expect(document["title"] == zoo.MARKUP, f"another title: {document['title']}")
    if end == "returns":
        returned = document["result"]
        whole = {"number": returned["payload"]["number"], **payload}
        rig.expect(returned["said"] == said, f"another text than {said!r}: {returned['said']!r}")
        rig.expect(returned["payload"] == whole, f"another payload: {returned['payload']}")
        rig.expect(_is_plain_name(document["file"]["name"]), f"a file {document['file']}")
    if end == "gives up":
        rig.expect(document["message"] == _stored(said), f"another message than {said!r}")
    if end == "raises":
        rig.expect(_stored(said) not in document["message"], "the owner is told of an error")


def _is_plain_name(name: str) -> bool:
    """Tell whether a file of this name stays in the folder it is saved to."""
    return name.isprintable() and not set(name) & set("/\\") and name not in ("", ".", "..")


def _check_pages(rig: Rig, site: Site, job: ServiceJob, said: str) -> None:
    text = quote(said)
    own = ("/jobs/", f"/jobs/{job.uid}/", f"/jobs/?kind={text}&before={text}")
    tags = (f"/own/?uid={job.uid}&kind=chaos-beast&then={text}", f"/own/?uid={text}&kind={text}")
    admin = "/admin/myxo_jobs/job/"
    staffs = (admin, f"{admin}{job.pk}/change/", f"{admin}?q={text}", f"{admin}?topic={text}")
    shown = {one: site.page(site.ada, one) for one in (*own, *tags)}
    shown |= {one: site.page(site.root, one) for one in staffs}
    for address, answer in shown.items():
        rig.expect(answer.status == 200, f"{address}: {answer.status}")
        acting = Acting(answer.text).found
        rig.expect(not acting, f"{address} has {acting[:3]}")
    words = unescape(shown[f"/jobs/{job.uid}/"].text)
    rig.expect(zoo.MARKUP in words, "the page shows another title")
    if job.payload["end"] == "gives up":
        rig.expect(_stored(said) in words.replace("\r\n", "\n") or "\r" in said, "no message")


class Acting(HTMLParser):
    """Collects what in a page would run that is not of ours."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        is_ours = tag != "script" or re.match("/[^/]", given.get("src", ""))
        runs = any(name.startswith("on") for name in given) or any(
            re.match(r"[\x00-\x20]*(javascript|data):", value, re.IGNORECASE)
            for name, value in given.items()
            if name in ("href", "src", "action", "formaction", "content", "data-then")
        )
        if not is_ours or runs or (tag == "img" and given.get("src") == "x"):
            self.found.append(self.get_starttag_text() or tag)


def _check_sent(rig: Rig, site: Site, job: ServiceJob, said: str) -> None:
    answer = site.ask(site.ada, f"/jobs/{job.uid}/download/")
    rig.expect(answer.status == 200, f"the file of {said!r}: {answer.status}")
    rig.expect(answer.body == said.encode(), f"the file of {said!r} has {answer.body!r}")
    sent_as = answer.header("Content-Disposition")
    names = re.findall(r"filename\*?=(?:utf-8'')?\"?((?:[^\"\\;]|\\.)*)", sent_as)
    rig.expect(sent_as.startswith("attachment; filename") and len(names) == 1, sent_as)
    rig.expect("%2F" not in sent_as and all(map(_is_plain, names)), f"a name {sent_as}")
    rig.expect(answer.header("X-Content-Type-Options") == "nosniff", "it may be sniffed")
    odd = [line for line in answer.headers if not "".join(line).isprintable()]
    cookies = answer.header("Set-Cookie")
    rig.expect(not odd and "owned" not in cookies, f"headers {odd} and cookies {cookies}")
    stored = job.result["file"]
    inside = f"myxo_jobs/chaos-beast/{job.uid}/"
    plain = stored.startswith(inside) and ".." not in stored and stored in _files(rig)
    rig.expect(plain, f"a file was stored as {stored}")


def _is_plain(name: str) -> bool:
    return name.isprintable() and "/" not in name


def _check_strangers(rig: Rig, site: Site, job: ServiceJob) -> None:
    """Check that others are answered about a job as about one that does not exist."""
    before = _as_it_is(job)
    for person in (site.eve, NOBODY):
        for method, what in (
            ("GET", ""),
            ("GET", "download/"),
            ("HEAD", "download/"),
            ("POST", "cancel/"),
            ("POST", "delete/"),
        ):
            for accept in ("application/json", "text/html"):
                there, not_there = (
                    _without_moments(site.ask(person, f"/jobs/{uid}/{what}", method, accept), uid)
                    for uid in (str(job.uid), NO_UID)
                )
                same = there == not_there and there[0] == 404
                rig.expect(same, f"a stranger's {method} {what}: {there[:2]}, not {not_there[:2]}")
        tag = site.page(person, f"/own/?uid={job.uid}&kind=chaos-beast").text
        rig.expect("Not available" in tag and zoo.MARKUP not in unescape(tag), "a stranger's tag")
        listed = site.ask(person, "/jobs/").text
        rig.expect(str(job.uid) not in listed, "a stranger's list has the job")
    rig.expect(_as_it_is(job) == before, f"a stranger has changed job {job.pk}")


def _without_moments(answer: Answer, uid: str) -> tuple[int, list[tuple[str, str]], bytes]:
    headers = [(name, value) for name, value in answer.headers if name != "Date"]
    return answer.status, headers, answer.body.replace(uid.encode(), b"")


def _as_it_is(job: ServiceJob) -> dict[str, Any] | None:
    """Return what may not be changed of a job."""
    from myxo_jobs.models import Job

    columns = ("status", "cancelled_at", "expires_at", "last_accessed_at", "updated_at", "result")
    return Job.objects.filter(pk=job.pk).values(*columns).first()


def _check_running(rig: Rig, site: Site) -> None:
    """Check that only its owner ends a job that runs."""
    payload = {"said": "waits", "end": "waits", "may_fail": True}
    uid = rig.oracle.enqueue("chaos-beast", payload, **site.ada.owner)

    def runs() -> ServiceJob | None:
        job = get_job(uid)
        return job if job is not None and job.status == "running" else None

    job = rig.wait_until(runs, because="the job of a beast runs")
    if job is None:
        return
    for person in (site.eve, NOBODY):
        for what in ("cancel", "delete"):
            status = site.ask(person, f"/jobs/{uid}/{what}/", "POST").status
            rig.expect(status == 404, f"a stranger's {what} of a running job: {status}")
    now = get_job(uid)
    well = now is not None and now.status == "running" and now.cancelled_at is None
    rig.expect(well, "a stranger has stopped a job")
    status = site.ask(site.ada, f"/jobs/{uid}/cancel/", "POST").status
    rig.expect(status == 200, f"its owner's cancel: {status}")
    ended = _ended(rig, uid)
    if ended is not None:
        rig.expect(ended.reason == "cancelled", f"cancelled by its owner: {ended.reason}")
        rig.bite()
