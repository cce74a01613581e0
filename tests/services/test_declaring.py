"""A service is declared as a class; what it cannot be is said at once."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import pytest

from myxo_jobs import HandlerConflict, ServiceInvalid
from myxo_jobs.handlers import registry
from myxo_jobs.services import JobService, ZipService, enqueue, get_job, register
from tests.rig import ROOT, process_environment


class Order(msgspec.Struct):
    note_id: int


class Incomparable(msgspec.Struct, eq=False):
    note_id: int


def service(**attributes: Any) -> type[JobService]:
    process = {"process": lambda self, job: None}
    return type("Export", (JobService,), {"kind": "export", **process, **attributes})


def test_a_registered_service_stays_the_class_it_was():
    declared = service()

    assert register(declared) is declared
    assert [one.topic for one in registry if one.topic.startswith("export")] == ["export"]


def test_a_service_that_tells_of_its_end_has_a_topic_for_that_with_five_attempts():
    register(service(finished=lambda self, job: None))

    assert registry.of_topic("export.finished").attempts == 5


def test_whoever_serves_a_kind_serves_what_tells_of_its_end():
    register(service(finished=lambda self, job: None))

    assert set(registry.choose(["export"])) == {"export", "export.finished"}
    assert set(registry.choose(["export"], ["export.finished"])) == {"export", "export.finished"}
    assert "export" not in registry.choose(None, ["export"])


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("kind", ""),
        ("kind", "../export"),
        ("kind", "a/b"),
        ("kind", "x" * 201),
        ("kind", "export.finished"),
        ("kind", 3),
        ("title", 3),
        ("retention_seconds", -1),
        ("retention_seconds", "1 day"),
        ("retention_seconds", float("nan")),
        ("max_concurrent", -1),
        ("max_concurrent", 1.5),
        ("max_concurrent", True),
        ("job_timeout_seconds", 0),
        ("attempts", 0),
        ("payload_type", dict),
        ("payload_type", Incomparable),
        ("storage", None),
        ("cancellable", "no"),
        ("lease", 0),
        ("backoff", -1),
        ("priority", 101),
    ],
)
def test_an_attribute_that_cannot_be_used_is_named(attribute, value):
    with pytest.raises(ServiceInvalid, match=rf"Export: {attribute} takes"):
        register(service(**{attribute: value}))

    assert registry.of_topic("export") is None


def test_what_is_no_service_is_refused():
    def generator(self: Any, job: Any) -> Any:
        yield

    async def coroutine(self: Any, job: Any) -> None: ...

    for wrong, words in [
        (object, "takes a subclass of JobService"),
        (service(), "takes a subclass"),
        (type("Idle", (JobService,), {"kind": "idle"}), r"no process\(job\)"),
        (service(process=generator), "process is a plain or async function"),
        (service(finished=generator), "finished is a plain or async function"),
        (service(cleanup=coroutine), "cleanup is a plain function"),
        (service(explain=coroutine), "explain is a plain function"),
        (service(may_see=coroutine), "may_see is a plain function"),
    ]:
        with pytest.raises(ServiceInvalid, match=words):
            register(wrong() if words == "takes a subclass" else wrong)


def test_two_services_of_one_kind_are_a_conflict_that_names_both():
    register(service())

    with pytest.raises(HandlerConflict, match="Export"):
        register(type("Other", (service(),), {}))


def test_a_service_may_be_declared_by_two_apps():
    assert register(register(ZipService)) is ZipService


def test_two_services_may_have_one_payload_type():
    register(service(payload_type=Order))
    register(service(kind="import", payload_type=Order))

    assert registry.of_topic("import").request is Order


def test_services_can_be_declared_before_the_apps_are_loaded(tmp_path):
    (tmp_path / "early").mkdir()
    (tmp_path / "early/__init__.py").touch()
    (tmp_path / "early/apps.py").write_text(
        "from django.apps import AppConfig\n"
        "from myxo_jobs.services import JobService, ZipService, register, enqueue, get_job\n"
        "register(ZipService)\n"
        "@register\n"
        "class Export(JobService):\n"
        "    kind = 'export'\n"
        "    def process(self, job): ...\n"
        "    def finished(self, job): ...\n"
        "class EarlyConfig(AppConfig):\n"
        "    name = 'early'\n"
    )
    code = (
        "import django; django.setup()\n"
        "from myxo_jobs.handlers import registry\n"
        "print([one.topic for one in registry if one.by_name])\n"
    )
    environment = process_environment(
        settings={"INSTALLED_APPS": ["early", "django.contrib.contenttypes", "myxo_jobs"]}
    )
    environment["PYTHONPATH"] = f"{tmp_path}:{ROOT}"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
    )

    assert done.stdout == "['zip', 'export', 'export.finished']\n", done.stderr


def test_a_kind_that_nobody_registered_is_named_with_those_that_are_there():
    register(service())

    with pytest.raises(LookupError, match=r"no service of kind 'exprot' .* there are: .*export"):
        enqueue("exprot", {})
    with pytest.raises(ValueError, match="kind None"):
        enqueue(None, {})


def test_a_malformed_uid_is_nobodys():
    for uid in ("", "x", None, 7, "{019a0000-0000-7000-8000-000000000001}", "\x00", "a" * 10_000):
        assert get_job(uid) is None


def test_a_service_can_be_made_of_another_one():
    register(type("Zipped", (ZipService,), {"kind": "zipped", "entries": lambda self, job: []}))
    register(ZipService)

    assert registry.of_topic("zipped").codec.name == "ZipFiles"
