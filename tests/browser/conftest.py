"""A real browser before a real site: the example project, with a worker beside it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from django.conf import settings

from tests.docs.reader import free_port
from tests.rig import ROOT, Process, wait_until

# What Debian's packages chromium and chromium-driver bring.
PROGRAMS = ("chromium", "chromedriver")
REQUIRED = "MYXO_TEST_BROWSER"
PASSWORD = "three-notes-and-a-tune"
SEED = """
from django.contrib.auth.models import User
from example_project.notes.models import Note
for name, count in (("ada", {ada}), ("bob", {bob}), ("eve", 1)):
    user = User.objects.create_user(name, password={password!r})
    Note.objects.bulk_create(
        Note(author=user, title=f"{{name}} {{n}}", text=f"“Größe” no. {{n}},\\nof {{name}}")
        for n in range(count)
    )
"""
# Ada's export takes over a minute, so that nobody is too slow to stop it.
ADAS_NOTES, BOBS_NOTES = 1500, 40


class Site:
    """The example project in processes of its own: `runserver` and `runjobs`."""

    def __init__(self, folder: Path, database_url: str) -> None:
        self.folder = folder
        self.address = f"http://127.0.0.1:{free_port()}"
        self._environment = {
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "example_project.settings",
            "DATABASE_URL": database_url,
            "NOTES_FILES": str(folder / "files"),
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": str(ROOT),
        }
        self._processes: list[Process] = []

    def manage(self, *words: str) -> None:
        done = subprocess.run(
            [sys.executable, "manage.py", *words],
            cwd=ROOT,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr

    def start(self, *words: str) -> Process:
        command = [sys.executable, "manage.py", *words]
        log = self.folder / f"{words[0]}-{len(self._processes)}.log"
        self._processes.append(Process(command, log, self._environment))
        return self._processes[-1]

    def open(self) -> None:
        self.manage("migrate", "-v0")
        seed = SEED.format(ada=ADAS_NOTES, bob=BOBS_NOTES, password=PASSWORD)
        self.manage("shell", "-v0", "-c", seed)
        server = self.start("runserver", "--noreload", self.address.removeprefix("http://"))
        self.start("runjobs").wait_for_log(" started using=")

        def answers() -> bool:
            try:
                with urlopen(f"{self.address}/accounts/login/", timeout=5) as page:
                    return page.status == 200
            except OSError:
                assert server.exit_code is None, server.log()
                return False

        wait_until(answers, because="the site answers", within=60)

    def end(self) -> None:
        for process in self._processes:
            process.end()


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    with ExitStack() as stack:
        site = Site(folder, stack.enter_context(_database(folder)))
        stack.callback(site.end)
        site.open()
        yield site


class _database:  # noqa: N801 - a context manager
    """Gives the URL of an empty database of the kind under test, for the site alone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._name = f"myxo_site_{os.getpid()}"

    def __enter__(self) -> str:
        if settings.DATABASE == "sqlite":
            return f"sqlite:///{self._folder}/site.sqlite3"
        from urllib.parse import quote

        from psycopg.conninfo import conninfo_to_dict

        self._on_server(f"CREATE DATABASE {self._name}")
        parts = conninfo_to_dict(os.environ["MYXO_TEST_POSTGRES"])
        host, port = quote(str(parts.get("host", "")), safe=""), parts.get("port", "")
        signed_in = ":".join(quote(str(parts[n])) for n in ("user", "password") if parts.get(n))
        return f"postgres://{signed_in}@{host}{f':{port}' if port else ''}/{self._name}"

    def __exit__(self, *raised: object) -> None:
        if settings.DATABASE != "sqlite":
            self._on_server(f"DROP DATABASE {self._name} WITH (FORCE)")

    def _on_server(self, statement: str) -> None:
        import psycopg

        with psycopg.connect(os.environ["MYXO_TEST_POSTGRES"], autocommit=True) as server:
            server.execute(statement)


@pytest.fixture(scope="session")
def programs() -> dict[str, str]:
    """Where the browser and its driver are. Without them a test is skipped, or, where
    MYXO_TEST_BROWSER is `required`, fails."""
    found = {name: shutil.which(name) for name in PROGRAMS}
    missing = [name for name, path in found.items() if path is None]
    if missing and os.environ.get(REQUIRED) == "required":
        pytest.fail(f"{', '.join(missing)} not found: apt-get install chromium chromium-driver")
    if missing:
        pytest.skip(f"{', '.join(missing)} not found: apt-get install chromium chromium-driver")
    return {name: str(path) for name, path in found.items()}


class Browser:
    """A window of a real browser, without a screen, in front of the site."""

    def __init__(self, driver: Any, address: str, downloads: Path) -> None:
        self.driver = driver
        self.address = address
        self.downloads = downloads

    def open(self, address: str) -> None:
        self.driver.get(address if address.startswith("http") else self.address + address)

    def sign_in(self, name: str) -> None:
        self.open("/accounts/login/")
        self.type("username", name)
        self.type("password", PASSWORD)
        self.press("Sign in")
        self.wait_for(lambda: f"Sign out {name}" in self.text("body"), "signed in")

    def type(self, field: str, words: str) -> None:
        self.wait_for(lambda: self.all(f"main [name={field}]"), f"there is a field {field}")
        self.all(f"main [name={field}]")[0].send_keys(words)

    def press(self, button: str) -> None:
        """Press a button, once it is there."""

        def press() -> bool:
            self.driver.find_element("xpath", f"//main//button[.={button!r}]").click()
            return True

        self.wait_for(press, f"there is a button {button}")

    def all(self, css: str) -> list[Any]:
        return list(self.driver.find_elements("css selector", css))

    def text(self, css: str) -> str:
        """Return what is shown at a place, empty if there is nothing."""
        return " ".join(element.text for element in self.all(css))

    def run(self, script: str, *values: Any) -> Any:
        return self.driver.execute_script(script, *values)

    def wait_for(self, condition: Callable[[], Any], because: str) -> Any:
        from selenium.common.exceptions import WebDriverException

        def look() -> Any:
            try:
                return condition()
            except WebDriverException:  # it is not there yet, or another page is coming
                return None

        try:
            return wait_until(look, because=because, within=60)
        except AssertionError as error:
            shown = f"{self.driver.current_url}\n{self.text('body')}"
            raise AssertionError(f"{error}\n{shown}") from None

    def pause(self, milliseconds: int) -> None:
        """Let the page be for a while."""
        script = "const done = arguments[1]; setTimeout(done, arguments[0])"
        self.driver.execute_async_script(script, milliseconds)

    def wait_for_state(self, words: str) -> None:
        self.wait_for(lambda: words in self.text(".myxo-job-state"), f"it says {words}")

    def complaints(self) -> list[str]:
        """Return what the console has said since, such as what the policy has refused."""
        # A browser asks every site for an icon, and says so.
        return [
            line["message"]
            for line in self.driver.get_log("browser")
            if "favicon.ico" not in line["message"]
        ]


@pytest.fixture(scope="session")
def drivers(
    programs: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[bool], tuple[Any, Path]]]:
    """Give a browser, with or without JavaScript, and the folder it saves into."""
    from selenium.webdriver import Chrome, ChromeOptions, ChromeService

    started: dict[bool, tuple[Any, Path]] = {}

    def start(javascript: bool) -> tuple[Any, Path]:
        downloads = tmp_path_factory.mktemp("downloads")
        options = ChromeOptions()
        options.binary_location = programs["chromium"]
        for argument in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu"):
            options.add_argument(f"--{argument}")
        options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
        preferences: dict[str, Any] = {"download.default_directory": str(downloads)}
        if not javascript:
            preferences["profile.managed_default_content_settings.javascript"] = 2
        options.add_experimental_option("prefs", preferences)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = Chrome(options=options, service=ChromeService(programs["chromedriver"]))
        driver.set_page_load_timeout(60)
        driver.set_script_timeout(60)
        return driver, downloads

    def give(javascript: bool) -> tuple[Any, Path]:
        if javascript not in started:
            started[javascript] = start(javascript)
        return started[javascript]

    yield give
    for driver, _ in started.values():
        driver.quit()


@pytest.fixture
def open_browser(drivers: Callable[[bool], tuple[Any, Path]]) -> Callable[..., Browser]:
    """Open a browser that knows nothing yet: `open_browser(site.address, javascript=False)`."""

    def start(address: str, *, javascript: bool = True) -> Browser:
        driver, downloads = drivers(javascript)
        # Away from the last page first: what it still asks could drop the next session's cookie.
        driver.get("about:blank")
        driver.get(f"{address}/accounts/login/")
        driver.delete_all_cookies()
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        driver.set_window_size(1280, 900)
        driver.get_log("browser")  # so that it is empty
        for file in downloads.iterdir():
            file.unlink()
        return Browser(driver, address, downloads)

    return start


@pytest.fixture
def browser(open_browser: Callable[..., Browser], site: Site) -> Browser:
    return open_browser(site.address)
