"""The setting MYXO_JOBS: everything has a default, and a misspelt name fails aloud."""

from __future__ import annotations

import subprocess
import sys

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings

from myxo_jobs import SettingsInvalid, conf
from tests.rig import ROOT, process_environment


def test_every_setting_has_a_default():
    assert conf.settings() == conf.Settings(
        payload_bytes=1024 * 1024, poll_seconds=1.0, grace_seconds=30.0
    )


def test_a_setting_is_read_when_it_is_used():
    with override_settings(MYXO_JOBS={"poll_seconds": 5}):
        assert conf.settings().poll_seconds == 5
        with override_settings(MYXO_JOBS={"grace_seconds": 0.5}):
            assert conf.settings() == conf.Settings(grace_seconds=0.5)
        assert conf.settings().poll_seconds == 5
    assert conf.settings() == conf.Settings()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"pol_seconds": 1}, "pol_seconds"),
        ({"poll_seconds": "1"}, "poll_seconds"),
        ({"poll_seconds": 0}, "poll_seconds"),
        ({"poll_seconds": float("nan")}, "poll_seconds"),
        ({"grace_seconds": -1}, "grace_seconds"),
        ({"grace_seconds": float("inf")}, "grace_seconds"),
        ({"payload_bytes": 0}, "payload_bytes"),
        ({"payload_bytes": 1.5}, "payload_bytes"),
        ({"payload_bytes": None}, "payload_bytes"),
        ({5: 1}, "MYXO_JOBS"),
        ([], "MYXO_JOBS"),
        (None, "MYXO_JOBS"),
    ],
    ids=str,
)
def test_an_unknown_or_ill_typed_setting_is_refused_by_name(given, named):
    with (
        override_settings(MYXO_JOBS=given),
        pytest.raises(ImproperlyConfigured, match=named) as caught,
    ):
        conf.settings()
    assert isinstance(caught.value, SettingsInvalid)


def test_a_misspelt_setting_stops_the_project_at_its_start():
    environment = process_environment(settings={"MYXO_JOBS": {"pol_seconds": 1}})
    check = subprocess.run(
        [sys.executable, "-m", "django", "check"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert check.returncode != 0
    assert "SettingsInvalid: MYXO_JOBS" in check.stderr
    assert "pol_seconds" in check.stderr
