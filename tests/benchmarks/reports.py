"""What a scenario measured, and whether it reaches its marks."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

OURS, RAW = "ours", "raw"
PEERS, DJANGO_PEERS = "every peer", "every Django peer"


class Mark(msgspec.Struct, frozen=True):
    """What a quantity of ours must reach: a bound, or a multiple of another side's.

    `of` is a side, or PEERS or DJANGO_PEERS for the best of those that were measured. A
    side may have variants, such as `pgqueuer, batches of 500`: the best of them counts.
    """

    quantity: str
    sign: Literal["≥", "≤"]
    factor: float
    of: str = ""
    side: str = OURS

    def __str__(self) -> str:
        factor = f"{self.factor:,.10g}"
        bound = f"{factor} × {self.of}" if self.of else factor
        return f"{self.side} {self.sign} {bound}"


def at_least(quantity: str, factor: float, of: str = "", side: str = OURS) -> Mark:
    return Mark(quantity, "≥", factor, of, side)


def at_most(quantity: str, factor: float, of: str = "", side: str = OURS) -> Mark:
    return Mark(quantity, "≤", factor, of, side)


class Verdict(msgspec.Struct, frozen=True):
    """A mark, what was measured for it (in its own measure), and whether that reaches it."""

    quantity: str
    mark: str
    measured: float | None
    ok: bool | None

    def __str__(self) -> str:
        if self.measured is None:
            return f"not measured  {self.mark}"
        return f"{'ok' if self.ok else 'MISSED':8} {self.mark}: {number(self.measured)}"


class Report(msgspec.Struct):
    """What a scenario measured: for each quantity and side one value a round."""

    scenario: str
    database: str
    what: str
    machine: str = ""
    values: dict[str, dict[str, list[float]]] = {}
    verdicts: list[Verdict] = []
    notes: list[str] = []
    # Why nothing of this counts, empty while it does.
    void: str = ""

    def add(self, quantity: str, side: str, value: float) -> None:
        """Add the value of a round. `quantity` names its unit, such as `jobs/s`."""
        self.values.setdefault(quantity, {}).setdefault(side, []).append(value)

    def median(self, quantity: str, side: str) -> float | None:
        values = self.values.get(quantity, {}).get(side)
        return statistics.median(values) if values else None

    def judge(self, marks: Iterable[Mark], django_peers: Sequence[str] = ()) -> None:
        """Compare the medians with the marks."""
        self.verdicts = [self._verdict(mark, django_peers) for mark in marks]

    def _verdict(self, mark: Mark, django_peers: Sequence[str]) -> Verdict:
        ours = self.median(mark.quantity, mark.side)
        other = self._other(mark, django_peers) if mark.of else 1.0
        if ours is None or not other:
            return Verdict(mark.quantity, str(mark), None, None)
        measured = ours / other
        ok = measured >= mark.factor if mark.sign == "≥" else measured <= mark.factor
        return Verdict(mark.quantity, str(mark), measured, ok)

    def _other(self, mark: Mark, django_peers: Sequence[str]) -> float | None:
        sides = [
            side
            for side in self.values.get(mark.quantity, {})
            if side == mark.of
            or side.startswith(f"{mark.of}, ")
            or (mark.of == PEERS and side not in (OURS, RAW))
            or (mark.of == DJANGO_PEERS and side in django_peers)
        ]
        medians = [statistics.median(self.values[mark.quantity][side]) for side in sides]
        if not medians:
            return None
        return max(medians) if mark.sign == "≥" else min(medians)

    @property
    def passed(self) -> bool:
        """Whether it counts, and no mark is missed. A mark not measured is none."""
        return not self.void and not any(verdict.ok is False for verdict in self.verdicts)

    def lines(self) -> list[str]:
        """Return the report as it is printed."""
        lines = [f"{self.scenario} on {self.database}: {self.what}"]
        if self.void:
            return [*lines, f"  VOID: {self.void}"]
        for quantity, sides in self.values.items():
            for side, values in sides.items():
                each = ", ".join(number(value) for value in values)
                median = number(statistics.median(values))
                lines.append(f"  {quantity:22} {side:22} {median:>10}   ({each})")
        lines += [f"  {verdict.quantity:22} {verdict}" for verdict in self.verdicts]
        return lines + [f"  {note}" for note in self.notes]


def number(value: float) -> str:
    """Return a figure with as many digits as mean something."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that so large a share of all do not exceed."""
    ordered = sorted(values)
    place = max(-(-len(ordered) * share // 1), 1)  # rounded up
    return ordered[int(place) - 1]
