"""The benchmarks measure what they say: what they print is what came of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks import pages
from tests.benchmarks.drive import drive
from tests.benchmarks.evidence import Void, check_each_ran_once
from tests.benchmarks.reports import (
    DJANGO_PEERS,
    OURS,
    PEERS,
    RAW,
    Report,
    at_least,
    at_most,
    percentile,
)


@pytest.fixture
def report():
    report = Report("drain", "PostgreSQL", "jobs a second")
    for ours, raw, peer in ((900, 2000, 100), (1000, 1900, 300), (5000, 2100, 200)):
        report.add("jobs/s", OURS, ours)
        report.add("jobs/s", RAW, raw)
        report.add("jobs/s", "peer, batches of 100", peer)
        report.add("jobs/s", "peer, batches of 500", 2 * peer)
        report.add("jobs/s", "django-peer", peer / 10)
    return report


def judged(report, mark):
    report.judge([mark], ["django-peer"])
    return report.verdicts[0]


def test_a_mark_compares_the_medians_of_the_rounds(report):
    assert judged(report, at_least("jobs/s", 0.5, RAW)).measured == 0.5
    assert judged(report, at_least("jobs/s", 0.5, RAW)).ok is True
    assert judged(report, at_least("jobs/s", 0.51, RAW)).ok is False
    assert judged(report, at_most("jobs/s", 999)).ok is False


def test_a_mark_counts_the_best_variant_of_a_peer(report):
    assert judged(report, at_least("jobs/s", 1, "peer")).measured == 1000 / 400


def test_a_mark_of_every_peer_counts_the_best_of_them(report):
    assert judged(report, at_least("jobs/s", 1, PEERS)).measured == 1000 / 400
    assert judged(report, at_most("jobs/s", 1, PEERS)).measured == 1000 / 20
    assert judged(report, at_least("jobs/s", 1, DJANGO_PEERS)).measured == 1000 / 20


def test_a_mark_without_its_other_side_is_not_measured_and_not_passed_off_as_ok(report):
    verdict = judged(report, at_least("jobs/s", 1, "huey"))

    assert (verdict.measured, verdict.ok) == (None, None)
    assert "not measured" in "\n".join(report.lines())


def test_a_missed_mark_and_a_void_run_do_not_pass(report):
    judged(report, at_least("jobs/s", 0.5, RAW))
    assert report.passed
    judged(report, at_least("jobs/s", 0.6, RAW))
    assert not report.passed
    assert not Report("drain", "PostgreSQL", "", void="a job was lost").passed


@pytest.mark.parametrize(
    ("ran", "words"),
    [([0, 1], "1 jobs were lost, 0 ran twice"), ([0, 1, 2, 2], "0 jobs were lost, 1 ran twice")],
)
def test_a_run_with_a_lost_or_repeated_job_is_void(ran, words):
    check_each_ran_once([2, 0, 1], range(3))

    with pytest.raises(Void, match=words):
        check_each_ran_once(ran, range(3))


def test_a_percentile_is_the_smallest_value_that_enough_do_not_exceed():
    hundred = list(range(1, 101))

    assert (percentile(hundred, 0.5), percentile(hundred, 0.99)) == (50, 99)
    assert percentile([7.0], 0.99) == 7.0
    assert percentile([3, 1, 2], 0.95) == 3


def test_a_new_report_replaces_the_old_one_of_its_scenario_and_database(report, tmp_path):
    file, page = tmp_path / "bench.json", tmp_path / "page.md"
    pages.add_to(file, [report, Report("drain", "SQLite", "", void="no worker")])
    newer = Report("drain", "PostgreSQL", "jobs a second", machine="two cores")
    newer.add("jobs/s", OURS, 7)
    newer.judge([at_least("jobs/s", 8)])
    pages.add_to(file, [newer])
    page.write_text(f"before\n{pages.BEGIN}\nold\n{pages.END}\nafter\n")

    pages.write_table(page, pages.read(file))

    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "| `drain` | jobs/s | 7 |  |  | ours ≥ 8: 7 | **missed** |" in text
    assert "| `drain` | void: no worker |" in text


FLUSH = """
import os, sys, time
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
began = time.monotonic()
os.fsync(file)
os.fdatasync(file)
print(time.monotonic() - began)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the shim is loaded by Linux's loader")
def test_the_slowed_drive_counts_each_flush_and_delays_it(tmp_path: Path):
    with drive(milliseconds=50) as slow:
        taken = subprocess.check_output(
            [sys.executable, "-c", FLUSH, str(tmp_path / "file")],
            env={**os.environ, **slow.environment},
        )

        assert slow.flushes() == 2
        assert float(taken) >= 0.1
