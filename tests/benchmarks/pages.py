"""The reports as a file and as the table of a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from tests.benchmarks.reports import OURS, RAW, Report, Verdict, number

BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"


def read(path: Path) -> list[Report]:
    """Return the reports of a file, none if there is no such file."""
    if not path.exists():
        return []
    return msgspec.json.decode(path.read_bytes(), type=list[Report])


def add_to(path: Path, reports: Iterable[Report]) -> None:
    """Add reports to a file; a scenario's new report replaces that of an earlier run."""
    known = {(report.scenario, report.database): report for report in read(path)}
    known |= {(report.scenario, report.database): report for report in reports}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(list(known.values()))) + b"\n")


def write_table(page: Path, reports: Sequence[Report]) -> None:
    """Replace what stands between the two comments of a page by the tables of the reports."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(before + "\n".join([BEGIN, "", *_tables(reports), END]) + after)


def _tables(reports: Sequence[Report]) -> Iterable[str]:
    for label in ("PostgreSQL", "SQLite"):
        of_it = [report for report in reports if report.database == label]
        if not of_it:
            continue
        yield from [f"### {label}", "", *_machines(of_it)]
        yield from ["| scenario | measured | ours | raw | others | mark | |", "|" + "---|" * 7]
        for report in of_it:
            yield from _rows(report)
        yield ""


def _machines(reports: Sequence[Report]) -> Iterable[str]:
    for machine in dict.fromkeys(report.machine for report in reports):
        yield from [f"{machine}.", ""]


def _rows(report: Report) -> Iterable[str]:
    if report.void:
        yield f"| `{report.scenario}` | void: {report.void.splitlines()[0]} | | | | | |"
        return
    name = f"`{report.scenario}`"
    for quantity, sides in report.values.items():
        verdicts = [verdict for verdict in report.verdicts if verdict.quantity == quantity]
        others = [
            f"{side} {number(report.median(quantity, side) or 0.0)}"
            for side in sides
            if side not in (OURS, RAW)
        ]
        cells = [
            name,
            quantity,
            _median(report, quantity, OURS),
            _median(report, quantity, RAW),
            "<br>".join(others),
            "<br>".join(_mark(verdict) for verdict in verdicts),
            "<br>".join(_word(verdict) for verdict in verdicts),
        ]
        yield f"| {' | '.join(cells)} |"
        name = ""


def _median(report: Report, quantity: str, side: str) -> str:
    median = report.median(quantity, side)
    return "" if median is None else number(median)


def _mark(verdict: Verdict) -> str:
    measured = "" if verdict.measured is None else f": {number(verdict.measured)}"
    return f"{verdict.mark}{measured}"


def _word(verdict: Verdict) -> str:
    if verdict.ok is None:
        return "not measured"
    return "ok" if verdict.ok else "**missed**"
