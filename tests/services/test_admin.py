"""The services in the admin: what their dials stand at, and how a person turns them."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client

from myxo_jobs.models import ServiceSettings
from myxo_jobs.services import JobService, enqueue, register

pytestmark = pytest.mark.django_db

LIST = "/admin/myxo_jobs/servicesettings/"


@pytest.fixture(autouse=True)
def export() -> None:
    @register
    class Export(JobService):
        kind = "export"
        title = "Exports <of> notes"

        def process(self, job: Any) -> None: ...


@pytest.fixture
def admin(client: Client) -> Client:
    client.force_login(User.objects.create_superuser("ada"))
    return client


def text(response: Any) -> str:
    assert response.status_code == 200
    return str(response.content.decode())


def test_a_kind_is_added_with_its_dials_and_shown_as_it_stands(admin):
    form = text(admin.get(f"{LIST}add/"))
    assert '<option value="export">' in form
    added = admin.post(
        f"{LIST}add/",
        {"kind": "export", "retention_seconds": "3600", "max_concurrent": "0"},
        follow=True,
    )

    row = ServiceSettings.objects.get()
    assert (row.kind, row.retention_seconds, row.max_concurrent) == ("export", 3600, 0)
    assert row.job_timeout_seconds is None
    page = text(added)
    assert "Exports &lt;of&gt; notes" in page
    assert "3,600 s" in page
    assert '<option value="export">' not in text(admin.get(f"{LIST}add/"))


def test_a_dial_is_changed_and_emptied_and_the_kind_is_not(admin):
    ServiceSettings.objects.create(kind="export", retention_seconds=60, max_concurrent=2)
    enqueue("export", {})
    page = text(admin.get(f"{LIST}export/change/"))
    assert 'name="kind"' not in page
    assert "waiting: 1" in page
    admin.post(f"{LIST}export/change/", {"max_concurrent": "5", "job_timeout_seconds": "9"})

    row = ServiceSettings.objects.get()
    assert (row.kind, row.retention_seconds, row.max_concurrent) == ("export", None, 5)
    assert row.job_timeout_seconds == 9


@pytest.mark.parametrize(
    "values",
    [{"max_concurrent": "-1"}, {"job_timeout_seconds": "0"}, {"retention_seconds": "soon"}],
    ids=repr,
)
def test_a_value_that_cannot_be_is_refused_in_the_form(admin, values):
    page = text(admin.post(f"{LIST}add/", {"kind": "export", **values}))

    assert "errorlist" in page
    assert not ServiceSettings.objects.exists()


def test_a_kind_that_is_gone_is_still_shown_and_can_be_deleted(admin):
    ServiceSettings.objects.create(kind="gone", max_concurrent=2)
    text(admin.get(LIST))
    text(admin.get(f"{LIST}gone/change/"))
    admin.post(f"{LIST}gone/delete/", {"post": "yes"})

    assert not ServiceSettings.objects.exists()


def test_who_may_only_look_cannot_turn_a_dial(client):
    ServiceSettings.objects.create(kind="export", max_concurrent=2)
    user = User.objects.create_user("bob", is_staff=True)
    user.user_permissions.add(Permission.objects.get(codename="view_servicesettings"))
    client.force_login(user)
    assert "Exports &lt;of&gt; notes" in text(client.get(LIST))
    refused = client.post(f"{LIST}export/change/", {"max_concurrent": "9"})

    assert refused.status_code == 403
    assert ServiceSettings.objects.get().max_concurrent == 2
