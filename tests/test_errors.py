"""What goes wrong, as a tree, and what a handler raises to steer its job."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.core.exceptions import ImproperlyConfigured

import myxo_jobs
from myxo_jobs import GiveUp, JobsError, Retry, Snooze
from myxo_jobs.errors import Steering


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(0, 0), (5, 5), (0.25, 0.25), (-5, 0), (timedelta(minutes=2), 120), (-timedelta(days=9), 0)],
)
def test_a_delay_is_seconds_or_a_timedelta(given, seconds):
    assert Retry(given).delay == Retry(delay=given).delay == seconds
    assert Snooze(given).delay == seconds


def test_a_retry_without_a_delay_takes_the_backoff_of_the_handler():
    assert Retry().delay is None


@pytest.mark.parametrize("steering", [Retry, Snooze])
@pytest.mark.parametrize("given", [float("nan"), float("inf"), -float("inf"), 1e18, timedelta.max])
def test_a_delay_without_an_end_is_refused(steering, given):
    with pytest.raises(ValueError, match=f"{steering.__name__}.*delay"):
        steering(given)


@pytest.mark.parametrize("steering", [Retry, Snooze])
@pytest.mark.parametrize("given", ["5", True, [5]])
def test_a_delay_of_another_type_is_refused(steering, given):
    with pytest.raises(TypeError, match=f"{steering.__name__}.*seconds or a timedelta"):
        steering(given)


def test_giving_up_keeps_its_reason():
    assert GiveUp("no such account").reason == "no such account"
    assert str(GiveUp("no such account")) == "no such account"


def test_steering_is_no_error_that_a_handler_catches_by_accident():
    for steering in (Retry, Snooze, GiveUp):
        assert issubclass(steering, Steering)
        assert not issubclass(steering, JobsError)


@pytest.mark.parametrize(
    ("name", "bases"),
    [
        ("SettingsInvalid", (JobsError, ImproperlyConfigured)),
        ("HandlerInvalid", (JobsError, ImproperlyConfigured, ValueError)),
        ("HandlerConflict", (JobsError, ImproperlyConfigured)),
        ("PayloadInvalid", (JobsError, ValueError)),
        ("PayloadTypeInvalid", (JobsError, TypeError)),
        ("OwnTransactionImpossible", (JobsError,)),
        ("ClaimLost", (JobsError,)),
        ("WorkerLost", (JobsError,)),
    ],
)
def test_an_error_is_caught_as_what_it_is_and_says_what_to_do(name, bases):
    error = getattr(myxo_jobs, name)

    assert issubclass(error, bases)
    assert all(issubclass(error, base) for base in bases)
    assert error.__doc__


def test_everything_public_is_named_at_the_front_door():
    for name in myxo_jobs.__all__:
        assert getattr(myxo_jobs, name) is not None
