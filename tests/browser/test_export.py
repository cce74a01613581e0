"""What a person does with an export: start it, watch it, stop it, fetch it."""

from __future__ import annotations

import csv
import io

from tests.browser.conftest import BOBS_NOTES, Browser

FOLLOW = """
window.told = [];
for (const name of ["job:progress", "job:done", "job:failed"])
  document.addEventListener(name, (event) => window.told.push([name, event.detail]));
window.spoken = [];
new MutationObserver((changes) => {
  window.spoken.push(document.querySelector("[role=status]").textContent);
}).observe(document.querySelector("[role=status]"), {childList: true});
"""


def notes_of(name: str, count: int) -> bytes:
    file = io.StringIO(newline="")
    rows = csv.writer(file)
    rows.writerow(["title", "text"])
    rows.writerows([f"{name} {n}", f"“Größe” no. {n},\nof {name}"] for n in range(count))
    return file.getvalue().encode()


def fetched(browser: Browser) -> bytes:
    """Return what the browser has saved, once it has."""

    def look() -> bytes | None:
        files = list(browser.downloads.glob("*.csv"))
        return files[0].read_bytes() if files else None

    content: bytes = browser.wait_for(look, "the file is saved")
    return content


def value(browser: Browser) -> float | None:
    """Return where the bar stands, None where it is indeterminate."""
    bar = "const bar = document.querySelector('progress');"
    result: float | None = browser.run(
        f"{bar} return bar && bar.hasAttribute('value') ? bar.value : null"
    )
    return result


def start_export(browser: Browser) -> str:
    """Press the button as a reader would; return the address of the page it leads to."""
    browser.open("/exports/")
    browser.press("Export all my notes")
    browser.wait_for(lambda: "/jobs/" in browser.driver.current_url, "the page of the job")
    browser.wait_for(lambda: browser.text(".myxo-job-state"), "it is there")
    return str(browser.driver.current_url)


def test_a_reader_watches_an_export_and_stops_it(browser):
    browser.sign_in("ada")
    page = start_export(browser)
    browser.run(FOLLOW)
    assert "Export of my notes" in browser.text("h1")
    first = browser.wait_for(lambda: value(browser), "the bar moves")
    browser.wait_for(lambda: (value(browser) or 0) > first, "it moves on")
    assert "of 1,500" in browser.text(".myxo-job-state")

    browser.press("Cancel")
    browser.wait_for_state("Cancelled")
    assert browser.driver.current_url == page, "the page has not been left"
    assert not browser.all("progress")[0].is_displayed()
    assert not browser.all(".myxo-job-cancel")[0].is_displayed()
    told = browser.run("return window.told")
    assert {name for name, _ in told[:-1]} == {"job:progress"}
    assert (told[-1][0], told[-1][1]["reason"]) == ("job:failed", "cancelled")
    assert "words" not in told[-1][1]
    assert browser.complaints() == [], "the policy of the site refuses nothing"


def test_a_reader_fetches_an_export_whose_bytes_are_right(browser):
    browser.sign_in("bob")
    start_export(browser)
    browser.run(FOLLOW)
    browser.wait_for_state("Done")
    assert value(browser) == 100
    browser.driver.find_element("link text", "notes of bob.csv").click()
    assert fetched(browser) == notes_of("bob", BOBS_NOTES)
    spoken = browser.run("return window.spoken")
    assert len(spoken) <= 7, "on changes of state and at quarters"

    browser.open("/exports/")
    assert "Done" in browser.text(".myxo-jobs")
    assert "notes of bob.csv" in browser.text(".myxo-jobs")
    assert browser.complaints() == []


def test_anothers_page_and_file_are_refused(browser):
    browser.sign_in("bob")
    page = start_export(browser)
    browser.wait_for_state("Done")
    browser.driver.delete_all_cookies()
    browser.sign_in("eve")

    for address in (page, f"{page}download/"):
        browser.open(address)
        assert "notes of bob" not in browser.driver.page_source
        assert "Page not found" in browser.driver.title
    assert not list(browser.downloads.glob("*.csv"))


def test_without_javascript_the_page_follows_the_job_and_has_all(open_browser, site):
    browser = open_browser(site.address, javascript=False)
    browser.sign_in("ada")
    start_export(browser)
    browser.press("Cancel")
    browser.wait_for_state("Cancelled")

    browser.driver.delete_all_cookies()
    browser.sign_in("bob")
    start_export(browser)
    browser.wait_for_state("Done")  # nobody has pressed anything
    browser.driver.find_element("link text", "notes of bob.csv").click()
    assert fetched(browser) == notes_of("bob", BOBS_NOTES)


def test_a_page_of_the_project_goes_on_when_its_job_is_done(browser):
    browser.sign_in("ada")
    browser.open("/statistics/")
    browser.press("Count all my words")
    browser.wait_for(
        lambda: "You have written 7500 words in 1500 notes." in browser.text("main"), "it went on"
    )
    assert browser.complaints() == []


def test_the_pages_are_accessible_light_and_dark_wide_and_narrow(browser):
    from axe_core_python.selenium import Axe

    found: dict[str, list[tuple[str, str]]] = {}

    def check(place: str, width: int, scheme: str) -> None:
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        browser.driver.set_window_size(width, 900)
        rules = Axe().run(browser.driver)["violations"]
        found[f"{place} {width} {scheme}"] = [(r["id"], r["nodes"][0]["html"]) for r in rules]

    browser.sign_in("ada")
    page = start_export(browser)
    browser.wait_for(lambda: value(browser), "the bar moves")
    check("running", 500, "dark")
    check("running", 1280, "light")
    browser.press("Cancel")
    browser.wait_for_state("Cancelled")
    for address in (page, "/jobs/", "/exports/"):
        browser.open(address)
        for width in (1280, 500):
            for scheme in ("light", "dark"):
                check(address, width, scheme)

    assert found == {place: [] for place in found}
