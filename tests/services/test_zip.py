"""An archive of storage files: sound, safe to unpack, and nothing in it that was not asked for."""

from __future__ import annotations

import os
import random
import shutil
import stat
import subprocess
import unicodedata
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.files.base import File
from django.core.files.storage import FileSystemStorage
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from myxo_jobs.services import (
    ZipEntry,
    ZipFiles,
    ZipService,
    cancel_job,
    enqueue,
    get_job,
    register,
)
from myxo_jobs.services.rows import ServiceJob
from myxo_jobs.services.zip_names import ZipNames, safe_name
from myxo_jobs.testing import run_jobs
from tests.rig import wait_until

needs_database = pytest.mark.django_db


@pytest.fixture
def media(private: Path, tmp_path: Path) -> Path:
    """The folder of the storage `default`, which sources are in."""
    folder = tmp_path / "media"
    folder.mkdir()
    return folder


@pytest.fixture
def make_zip(
    media: Path, private: Path
) -> Callable[..., tuple[ServiceJob, zipfile.ZipFile | None]]:
    """Run a zip job; return it and its archive, None where it failed."""
    register(ZipService)

    def make(
        files: Iterable[ZipEntry], missing: Any = "fail", kind: str = "zip", **options: Any
    ) -> tuple[ServiceJob, zipfile.ZipFile | None]:
        uid = enqueue(kind, ZipFiles(list(files), missing), **options)
        run_jobs(topics=[kind], raise_errors=False)
        job = get_job(uid)
        assert job is not None
        if job.status != "done":
            return job, None
        return job, zipfile.ZipFile(private / job.result["file"])

    return make


def check_soundness(archive: zipfile.ZipFile) -> None:
    """Read all of it, also with Info-ZIP's `unzip` where that is installed."""
    assert archive.testzip() is None
    if shutil.which("unzip"):
        subprocess.run(["unzip", "-qt", archive.filename], check=True, timeout=600)


def contents(archive: zipfile.ZipFile) -> dict[str, bytes]:
    return {info.filename: archive.read(info) for info in archive.infolist()}


def write(media: Path, **files: str) -> list[ZipEntry]:
    entries = []
    for name, text in files.items():
        (media / name).write_text(text)
        entries.append(ZipEntry(name))
    return entries


# -- what is in it -------------------------------------------------------------------


@needs_database
def test_the_archive_has_the_files_in_their_order_and_tells_how_much(make_zip, media):
    entries = write(media, b="bb", a="a" * 5_000, c="")
    job, archive = make_zip(entries)

    assert list(contents(archive).items()) == [("b", b"bb"), ("a", b"a" * 5_000), ("c", b"")]
    size = Path(archive.filename).stat().st_size
    assert job.result["file"].endswith("/files.zip")
    assert (job.item_count, job.bytes_in, job.bytes_out) == (3, 5_002, size)
    assert (job.progress_done, job.progress_total) == (5_002, 5_002)
    assert "missing" not in job.result


@needs_database
def test_an_archive_of_nothing_is_one(make_zip):
    _, archive = make_zip([])

    assert archive.infolist() == []


@needs_database
def test_entries_are_as_every_system_opens_them(make_zip, media):
    (media / "photo.JPG").write_bytes(b"x" * 1000)
    (media / "notes.txt").write_bytes(b"x" * 1000)
    (media / "old.txt").write_text("x")
    (media / "future.txt").write_text("x")
    os.utime(media / "notes.txt", (1_700_000_000, 1_700_000_000))
    os.utime(media / "old.txt", (0, 0))
    os.utime(media / "future.txt", (2**32 + 10**9, 2**32 + 10**9))
    names = ["photo.JPG", "notes.txt", "old.txt", "future.txt"]
    _, archive = make_zip((ZipEntry(n) for n in names), time_zone="Europe/Berlin")
    photo, notes, old, future = archive.infolist()

    assert (photo.compress_type, notes.compress_type) == (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
    assert notes.compress_size < 100
    assert notes.date_time == (2023, 11, 14, 23, 13, 20)
    assert old.date_time == future.date_time == (1980, 1, 1, 0, 0, 0)
    for info in archive.infolist():
        assert info.flag_bits & 0x08 == 0, "no data descriptor"
        assert info.external_attr >> 16 == stat.S_IFREG | 0o644
        assert info.create_system == 3
        assert info.extract_version < 45, "no ZIP64"
        assert info.extra == b""


@needs_database
def test_it_is_sound_and_unpacks_the_same(make_zip, media, tmp_path):
    chance = random.Random(7)
    expected = {}
    for number in range(300):
        name = f"{number} ünïcode {'x' * chance.randrange(40)}.bin"
        expected[name] = chance.randbytes(chance.choice([0, 1, 100, 70_000]))
        (media / name).write_bytes(expected[name])
    job, archive = make_zip(ZipEntry(name) for name in expected)
    check_soundness(archive)
    archive.extractall(tmp_path / "out")

    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == expected
    assert job.item_count == 300


@needs_database
def test_a_payload_of_a_dict_will_do_and_a_wrong_one_is_refused(make_zip, media):
    write(media, a="a")
    uid = enqueue("zip", {"files": [{"source": "a", "name": "x/y.txt"}], "missing": "skip"})
    run_jobs()

    assert get_job(uid).result["missing"] == []
    with pytest.raises(ValueError, match=r"missing"):
        enqueue("zip", {"files": [], "missing": "ignore"})
    with pytest.raises(ValueError, match=r"source"):
        enqueue("zip", {"files": [{"name": "a"}]})


# -- names ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("notes/2024/a.txt", "notes/2024/a.txt"),
        ("../../etc/passwd", "etc/passwd"),
        ("/etc/passwd", "etc/passwd"),
        ("a/../b", "a/b"),
        ("a/./b", "a/b"),
        ("C:\\Windows\\a.txt", "Windows/a.txt"),
        ("C:a.txt", "a.txt"),
        ("\\\\server\\share\\a.txt", "server/share/a.txt"),
        ("a//b", "a/b"),
        ("a\\..\\b", "a/b"),
        ("", "file"),
        (".", "file"),
        ("..", "file"),
        ("...", "file"),
        (" . ", "file"),
        ("/", "file"),
        ("a. ", "a"),
        ("a ./b.", "a/b"),
        ("con", "_con"),
        ("CON.txt", "_CON.txt"),
        ("a/Nul.tar.gz/b", "a/_Nul.tar.gz/b"),
        ("com1", "_com1"),
        ("LPT9.x", "_LPT9.x"),
        ("COM¹.txt", "_COM¹.txt"),
        ("con .txt", "_con .txt"),
        ("console.txt", "console.txt"),
        ('a<b>c:d"e|f?g*h', "a_b_c_d_e_f_g_h"),
        ("a\x00\n\x1f\x7fb", "ab"),
        ("a\u202egnp.exe", "agnp.exe"),
        ("\ud800", "file"),
        (".htaccess", ".htaccess"),
        ("é" * 200 + ".txt", "é" * 125 + ".txt"),
        ("x" * 300 + ". y", "x" * 252 + ". y"),
        ("x" * 254 + " " + "y" * 40, "x" * 254),
    ],
)
def test_a_name_is_made_safe_on_every_system(name, safe):
    assert safe_name(name) == safe


@pytest.mark.parametrize(
    ("names", "taken"),
    [
        (["a.txt", "a.txt", "a.txt"], ["a.txt", "a (2).txt", "a (3).txt"]),
        (["a.txt", "A.TXT", "a (2).txt"], ["a.txt", "A (2).TXT", "a (2) (2).txt"]),
        (["é", "e\u0301", "É"], ["é", "e\u0301 (2)", "É (3)"]),
        (["straße", "STRASSE"], ["straße", "STRASSE (2)"]),
        (["a/b", "A/B", "a/c"], ["a/b", "A/B (2)", "a/c"]),
        (["a", "a/b", "a/c"], ["a", "a (2)/b", "a (3)/c"]),
        (["a/b", "a"], ["a/b", "a (2)"]),
        (["", ".."], ["file", "file (2)"]),
        (["x" * 255] * 2, ["x" * 255, "x" * 251 + " (2)"]),
    ],
)
def test_names_are_distinct_also_ignoring_case_and_unicode_form(names, taken):
    one = ZipNames()

    assert [one.take(name) for name in names] == taken


@hypothesis_settings(max_examples=200, deadline=None)
@given(st.lists(st.text(alphabet="aAeE\u0301é./\\: (2)\x00nNuUlLß", max_size=12), max_size=12))
def test_every_list_of_names_unpacks_distinct_and_inside_the_target(names):
    one = ZipNames()
    taken = [one.take(name) for name in names]
    keys = [unicodedata.normalize("NFC", name).casefold() for name in taken]
    folders = {
        "/".join(key.split("/")[:depth])
        for key in keys
        for depth in range(1, 9)
        if depth < len(key.split("/"))
    }

    assert len(set(keys)) == len(names)
    assert set(keys).isdisjoint(folders), "a name that is a file and a folder"
    for name in taken:
        assert not name.startswith("/")
        for part in name.split("/"):
            assert part not in ("", ".", "..")
            assert part == part.rstrip(". ")
            assert len(part.encode()) <= 255
            assert part.partition(".")[0].strip().lower() != "nul"


@needs_database
def test_files_of_one_name_are_all_in_it(make_zip, media):
    for folder in "abc":
        (media / folder).mkdir()
        (media / folder / "notes.txt").write_text(folder)
    entries = [ZipEntry(f"{folder}/notes.txt") for folder in "abc"]
    entries.append(ZipEntry("a/notes.txt", name="../NOTES.txt"))
    _, archive = make_zip(entries)

    assert contents(archive) == {
        "notes.txt": b"a",
        "notes (2).txt": b"b",
        "notes (3).txt": b"c",
        "NOTES (4).txt": b"a",
    }


# -- sources -------------------------------------------------------------------------


def outside(media: Path, tmp_path: Path) -> dict[str, ZipEntry]:
    """Return sources that may not be read, or are not there."""
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    (media / "link.txt").symlink_to(secret)
    (media / "folder_link").symlink_to(tmp_path)
    (media / "loop").symlink_to(media / "loop")
    (media / "folder").mkdir()
    os.mkfifo(media / "pipe")
    return {
        "parent": ZipEntry("../secret.txt", name="n.txt"),
        "absolute": ZipEntry(str(secret), name="n.txt"),
        "link": ZipEntry("link.txt", name="n.txt"),
        "linked folder": ZipEntry("folder_link/secret.txt", name="n.txt"),
        "loop": ZipEntry("loop", name="n.txt"),
        "folder": ZipEntry("folder", name="n.txt"),
        "the storage itself": ZipEntry(".", name="n.txt"),
        "pipe": ZipEntry("pipe", name="n.txt"),
        "missing": ZipEntry("nothing.txt", name="n.txt"),
        "below a file": ZipEntry("a/nothing.txt", name="n.txt"),
        "nothing": ZipEntry("", name="n.txt"),
        "NUL": ZipEntry("a\x00", name="n.txt"),
        "too long": ZipEntry("x" * 5000, name="n.txt"),
        "another storage": ZipEntry("elsewhere", name="n.txt", storage="myxo_jobs"),
        "no storage": ZipEntry("elsewhere", name="n.txt", storage="nowhere"),
    }


WHICH = [
    *("parent", "absolute", "link", "linked folder", "loop", "folder", "the storage itself"),
    *("pipe", "missing", "below a file", "nothing", "NUL", "too long", "another storage"),
    "no storage",
]


@needs_database
@pytest.mark.parametrize("which", WHICH)
def test_a_source_that_cannot_be_read_fails_the_job_at_once_naming_the_entry(
    make_zip, media, tmp_path, files, which
):
    (entry,) = write(media, a="a")
    bad = outside(media, tmp_path)[which]
    job, _ = make_zip([entry, bad])

    assert (job.status, job.attempts, job.reason) == ("failed", 1, "refused")
    assert "“n.txt”" in job.message
    if bad.source.strip("./"):
        assert bad.source not in job.message
        assert str(tmp_path) not in job.message
    assert files() == []


@needs_database
def test_with_skip_they_are_left_out_whole_and_named(make_zip, media, tmp_path):
    good = write(media, a="a", z="z")
    bad = list(outside(media, tmp_path).values())
    job, archive = make_zip([good[0], *bad, good[1]], "skip")
    names = ["n.txt"] + [f"n ({number}).txt" for number in range(2, len(bad) + 1)]

    assert contents(archive) == {
        "a": b"a",
        "z": b"z",
        "MISSING.txt": "".join(f"{name}\n" for name in names).encode(),
    }
    assert job.result["missing"] == names
    assert (job.item_count, job.bytes_in) == (2, 2)
    assert archive.getinfo("MISSING.txt").external_attr >> 16 == stat.S_IFREG | 0o644


@needs_database
def test_the_list_of_what_is_missing_has_its_name_whatever_else_is_called_so(make_zip, media):
    entries = write(media, **{"MISSING.txt": "a file of the project"})
    _, archive = make_zip([*entries, ZipEntry("nothing")], "skip")

    assert contents(archive) == {
        "MISSING (2).txt": b"a file of the project",
        "MISSING.txt": b"nothing\n",
    }


@needs_database
def test_a_link_inside_the_storage_is_followed(make_zip, media):
    write(media, a="inside")
    (media / "link.txt").symlink_to(media / "a")
    _, archive = make_zip([ZipEntry("link.txt")])

    assert contents(archive) == {"link.txt": b"inside"}


class Unsteady(FileSystemStorage):
    """Its files change while they are read."""

    def _open(self, name: str, mode: str = "rb") -> File[bytes]:
        opened = super()._open(name, mode)
        return {"shrinks": Shrinking, "grows": Growing, "vanishes": Vanishing}.get(name, File)(
            opened.file
        )


class Shrinking(File):  # type: ignore[type-arg]
    def read(self, size: int = -1) -> bytes:
        return self.file.read(size // 2)[:-1]


class Growing(File):  # type: ignore[type-arg]
    def read(self, size: int = -1) -> bytes:
        return self.file.read(size) or b"more"


class Vanishing(File):  # type: ignore[type-arg]
    reads = 0

    def read(self, size: int = -1) -> bytes:
        self.reads += 1
        if self.reads > 1:
            raise FileNotFoundError("it is gone")
        return self.file.read(10)


@needs_database
@pytest.mark.parametrize("which", ["shrinks", "grows", "vanishes"])
def test_a_source_that_changes_while_it_is_read_is_not_half_in_the_archive(
    make_zip, media, settings, which, tmp_path
):
    settings.STORAGES = {
        **settings.STORAGES,
        "default": {"BACKEND": f"{__name__}.Unsteady", "OPTIONS": {"location": str(media)}},
    }
    first, last = write(media, a="a" * 100, z="z" * 100)
    (media / which).write_bytes(random.Random(2).randbytes(3_000_000))
    job, archive = make_zip([first, ZipEntry(which), last], "skip")

    assert job.result["missing"] == [which]
    assert list(contents(archive)) == ["a", "z", "MISSING.txt"]
    assert Path(archive.filename).stat().st_size < 1000, "nothing of it is left in between"
    check_soundness(archive)
    failed, _ = make_zip([first, ZipEntry(which), last])
    assert (failed.status, failed.reason, failed.attempts) == ("failed", "refused", 1)
    assert f"“{which}”" in failed.message


class Distant(FileSystemStorage):
    """As one behind a network, which is down now and then."""

    def path(self, name: str) -> str:
        raise NotImplementedError

    def exists(self, name: str) -> bool:
        return Path(str(self.location), name).exists()

    def size(self, name: str) -> int:
        if name == "flaky" and not Distant.up:
            raise ConnectionError("the network is down")
        return Path(str(self.location), name).stat().st_size

    def get_modified_time(self, name: str) -> Any:
        raise NotImplementedError

    def _open(self, name: str, mode: str = "rb") -> File[bytes]:
        return File(Path(str(self.location), name).open("rb"))

    up = True


@needs_database
def test_a_storage_elsewhere_is_read_too_and_its_outage_is_an_error_to_be_tried_again(
    make_zip, media, settings
):
    settings.STORAGES = {
        **settings.STORAGES,
        "default": {"BACKEND": f"{__name__}.Distant", "OPTIONS": {"location": str(media)}},
    }
    entries = write(media, a="a", flaky="b")
    _, archive = make_zip(entries)
    assert contents(archive) == {"a": b"a", "flaky": b"b"}
    assert archive.infolist()[0].date_time == (1980, 1, 1, 0, 0, 0)
    gone, _ = make_zip([ZipEntry("nothing")])
    assert (gone.reason, "“nothing”" in gone.message) == ("refused", True)
    Distant.up = False
    try:
        job, _ = make_zip(entries)
    finally:
        Distant.up = True
    assert (job.status, job.attempts) == ("pending", 1)


# -- subclasses ----------------------------------------------------------------------


@needs_database
def test_a_subclass_looks_its_files_up_when_it_runs(make_zip, media):
    class Photos(ZipService):
        kind = "photos"
        payload_type = None
        missing = "skip"

        def entries(self, job: ServiceJob) -> Iterator[ZipEntry]:
            for number in range(job.payload["count"]):
                yield ZipEntry(f"{number}", name=f"photos/{number}.txt")

    register(Photos)
    write(media, **{"0": "zero", "1": "one"})
    uid = enqueue("photos", {"count": 3})
    run_jobs(topics=["photos"])
    job = get_job(uid)

    assert (job.status, job.item_count, job.progress_total) == ("done", 2, None)
    assert job.result["missing"] == ["photos/2.txt"]


@needs_database
def test_more_storages_are_allowed_by_name(make_zip, media, private):
    class Both(ZipService):
        kind = "both"
        storages = ("default", "myxo_jobs")

    register(Both)
    (private / "b").write_text("b")
    _, archive = make_zip([*write(media, a="a"), ZipEntry("b", storage="myxo_jobs")], kind="both")

    assert contents(archive) == {"a": b"a", "b": b"b"}


@pytest.mark.django_db(transaction=True)
def test_a_zip_can_be_cancelled_while_it_is_made(make_zip, media, worker, files):
    class Endless(ZipService):
        kind = "endless"

        def entries(self, job: ServiceJob) -> Iterator[ZipEntry]:
            while True:
                yield ZipEntry("a")

    register(Endless)
    write(media, a="a" * 1_000)
    worker(topics=["endless"])
    uid = enqueue("endless", ZipFiles([]))
    wait_until(lambda: get_job(uid).progress_done, because="it runs", within=30)
    cancel_job(uid)
    job = wait_until(
        lambda: get_job(uid) if get_job(uid).status == "failed" else None,
        because="it stops",
        within=30,
    )

    assert job.reason == "cancelled"
    assert files() == []


@needs_database
def test_many_missing_names_are_all_in_the_archive_and_some_in_the_result(make_zip, media):
    entries = [ZipEntry(f"{number:05}" + "x" * 200) for number in range(3_000)]
    job, archive = make_zip(entries, "skip")

    assert len(archive.read("MISSING.txt").splitlines()) == 3_000
    assert 500 < len(job.result["missing"]) < 3_000
