"""Time zones of projects: moments mean the same in all of them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.rig import ROOT, process_environment

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize(
    ("use_tz", "zone"),
    [
        (True, "UTC"),
        (True, "Asia/Kathmandu"),
        (False, "UTC"),
        (False, "America/St_Johns"),
    ],
)
def test_delays_and_leases_hold_in_every_time_zone_without_a_warning(use_tz, zone):
    delay = 2.0
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.worker.zones", str(delay)],
        cwd=ROOT,
        env=process_environment(settings={"USE_TZ": use_tz, "TIME_ZONE": zone}),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    assert "Warning" not in ran.stderr
    told = json.loads(ran.stdout)

    assert (told["use_tz"], told["left"]) == (use_tz, 0)
    assert {name: len(moments) for name, moments in told["starts"].items()} == {
        "now": 1,
        "delayed": 1,
        "at": 1,
    }
    assert told["starts"]["now"][0] < 2.0
    for name in ("delayed", "at"):
        # The moment was taken a little before the start of `delay`.
        assert delay - 0.05 <= told["starts"][name][0] < delay + 2.0
    assert all(off < 5.0 for off in told["off"].values()), told["off"]
