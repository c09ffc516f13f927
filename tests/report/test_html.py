from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lowtide.core.trace import Trace
from lowtide.core.units import format_bytes, format_seconds
from lowtide.report import Focus, Outcome, html_report, journeys
from lowtide.report.html import data_of
from tests.report.browser import Page, browser_path, open_browser
from tests.report.samples import POLICIES, sample, vgg

NASTY = '</script><script>document.title="taken"</script>{{data}}<img src=x onerror=alert(1)>'


def nasty() -> tuple[Any, Focus]:
    """Return the sample with a trace whose names try to break out of the page."""
    comparison, focus = sample()
    trace: Trace = replace(vgg(), ops=tuple(replace(op, module=NASTY, name=f"aten::{NASTY}") for op in vgg().ops))
    return replace(comparison, model=NASTY), replace(focus, problem=replace(focus.problem, trace=trace))


def test_the_page_needs_nothing_from_outside() -> None:
    page = html_report(*sample())
    assert not re.findall(r'(?:src|href)\s*=\s*["\']?(?!#|data:)[^"\'\s>]', page)
    # The one address is the name of SVG's namespace, which nobody loads.
    assert set(re.findall(r"https?://[^\s\"'<]+", page)) <= {"http://www.w3.org/2000/svg"}
    assert "@import" not in page
    assert "url(" not in page
    assert "default-src 'none'" in page


def test_equal_reports_are_equal_byte_by_byte() -> None:
    assert html_report(*sample()) == html_report(*sample())


def test_the_page_holds_the_timelines_figures_exactly() -> None:
    comparison, focus = sample()
    data = data_of(html_report(comparison, focus))
    assert [step["policy"] for step in data["focus"]["steps"]] == [name for name in POLICIES if name != "keep_all"]
    for shown, step in zip(data["focus"]["steps"], focus.steps, strict=True):
        for name, value in shown["figures"].items():
            assert value == getattr(step.timeline, name), name
        assert shown["memory"]["live"] == [nbytes for _, nbytes in step.timeline.memory]
        held = {tier["tier"]: list(zip(tier["at"], tier["held"], strict=True)) for tier in shown["tiers"]}
        assert held == {
            tier: [(round(at_s * 1e9), nbytes) for at_s, nbytes in curve] for tier, curve in step.timeline.tiers.items()
        }
        assert shown["spans"]["start"] == [round(span.start_s * 1e9) for span in step.timeline.spans]
        assert len(shown["journeys"]) == len(journeys(focus.problem.trace, step.plan, step.timeline))
        assert all(journey["why"] for journey in shown["journeys"])
    assert [result["ran"] for result in data["results"]] == [
        isinstance(result, Outcome) for result in comparison.results
    ]


def test_policies_come_with_where_they_are_from() -> None:
    about = {policy["name"]: policy for policy in data_of(html_report(*sample()))["policies"]}
    assert list(about) == list(POLICIES)
    assert "2016" in about["vdnn"]["paper"]
    assert about["vdnn"]["runs"]
    assert about["vdnn"]["filled_in"]


def test_names_in_a_trace_cannot_break_out_of_the_page() -> None:
    page = html_report(*nasty())
    assert page.count("<script") == html_report(*sample()).count("<script") == 2
    assert "<img src=x" not in page
    assert data_of(page)["model"] == NASTY


def test_a_comparison_alone_makes_a_page_that_says_what_is_missing() -> None:
    data = data_of(html_report(sample()[0], None, note="no timelines: the trace is gone"))
    assert data["focus"] is None
    assert data["note"] == "no timelines: the trace is gone"


# ---- in a browser ----

needs_browser = pytest.mark.skipif(browser_path() is None, reason="no Chromium is installed")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(html_report(*sample()), encoding="utf-8")
    with open_browser() as found:
        found.open(path)
        yield found


def figures(page: Page) -> dict[str, list[Any]]:
    """Return what the cards show: by figure, the exact value and the text."""
    found = page.run(
        "Object.fromEntries([...document.querySelectorAll('[data-figure]')]"
        ".map((node) => [node.dataset.figure, [Number(node.dataset.value), node.textContent]]))"
    )
    assert isinstance(found, dict)
    return found


def choose(page: Page, policy: str) -> None:
    page.run(
        f"document.getElementById('policy').value = '{policy}';"
        "document.getElementById('policy').dispatchEvent(new Event('change'))"
    )


@needs_browser
def test_the_page_opens_without_errors_and_without_the_network(page: Page) -> None:
    assert page.errors == []
    assert [url.split(":")[0] for url in page.requests] == ["file"]
    assert page.run("document.title").startswith("Simulated: vgg in ")
    assert "vgg in " in page.run("document.querySelector('h1').textContent")


@needs_browser
@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "keep_all"])
def test_the_numbers_on_the_page_are_the_timelines(page: Page, policy: str) -> None:
    _, focus = sample()
    timeline = next(step.timeline for step in focus.steps if step.timeline.policy == policy)
    choose(page, policy)
    shown = figures(page)
    for name in ("step_s", "stall_s", "recompute_s"):
        assert shown[name] == [getattr(timeline, name), format_seconds(getattr(timeline, name))]
    for name in ("peak_bytes", "budget_bytes", "moved_out_bytes", "moved_in_bytes"):
        assert shown[name] == [getattr(timeline, name), format_bytes(getattr(timeline, name))]
    assert page.errors == []


@needs_browser
def test_formats_in_the_page_are_those_of_the_library(page: Page) -> None:
    sizes = [0, 1, 1023, 1024, 1535, 10**6, 1047552, 10 * 2**20 - 1, 10**9, 2**40 * 3000, -5000]
    times = [0.0, 4e-7, 9.994e-4, 9.996e-4, 0.0012, 0.99994, 0.99996, 1.5, 59.99, 60, 3596, 3598, 9e4, -0.5]
    assert page.run(f"{json.dumps(sizes)}.map(formatBytes)") == [format_bytes(each) for each in sizes]
    assert page.run(f"{json.dumps(times)}.map(formatSeconds)") == [format_seconds(each) for each in times]


@needs_browser
def test_the_results_table_lists_every_case_and_sorts(page: Page) -> None:
    comparison, _ = sample()
    page.run("document.getElementById('budget').value = 'all'; drawMachine()")
    rows = "[...document.querySelectorAll('#results-table tbody tr')].map((row) => row.cells[0].textContent)"
    assert sorted(page.run(rows)) == sorted(result.policy for result in comparison.results)
    ran = [result.step_s for result in comparison.results if isinstance(result, Outcome)]
    button = "[...document.querySelectorAll('#results-table th button')].find((each) => each.textContent === 'step')"
    page.run(f"{button}.click()")
    shown = page.run("[...document.querySelectorAll('#results-table tbody tr')].map((row) => row.cells[3].textContent)")
    assert [text for text in shown if text] == [format_seconds(each) for each in sorted(ran, reverse=True)]
    assert page.run(f"{button}.parentElement.getAttribute('aria-sort')") == "descending"
    page.run(f"{button}.click()")
    shown = page.run("[...document.querySelectorAll('#results-table tbody tr')].map((row) => row.cells[3].textContent)")
    assert [text for text in shown if text] == [format_seconds(each) for each in sorted(ran)]


@needs_browser
def test_the_plan_has_a_row_for_every_absence_and_a_filter(page: Page) -> None:
    _, focus = sample()
    step = next(step for step in focus.steps if step.timeline.policy == "swap_all")
    found = journeys(focus.problem.trace, step.plan, step.timeline)
    choose(page, "swap_all")
    rows = "document.querySelectorAll('#plan-table tbody tr').length"
    assert page.run(rows) == len(found) > 5
    effects = page.run("[...document.querySelectorAll('#plan-table tbody tr')].map((row) => row.cells[7].textContent)")
    stalled = sorted(f"stalled {format_seconds(each.stall_s)}" for each in found if each.stall_s > 0)
    assert sorted(text for text in effects if text.startswith("stalled")) == stalled != []
    page.run("byId('filter').value = 'max_pool'; byId('filter').dispatchEvent(new Event('input'))")
    made = page.run("[...document.querySelectorAll('#plan-table tbody tr')].map((row) => row.cells[0].textContent)")
    assert made
    assert all("max_pool" in text for text in made)
    page.run("byId('filter').value = ''; byId('filter').dispatchEvent(new Event('input'))")


@needs_browser
def test_the_timeline_zooms_by_mouse_and_by_keys_and_reads_events_out(page: Page) -> None:
    choose(page, "swap_all")
    page.run("document.getElementById('chart').scrollIntoView({ behavior: 'instant' })")
    page.settle()
    left, top, width = page.run(
        "(() => { const box = byId('chart').getBoundingClientRect(); return [box.left, box.top, box.width] })()"
    )
    window = "[page.chart.from, page.chart.to, page.chart.end]"
    start, stop, end = page.run(window)
    assert (start, stop) == (0, end)
    page.mouse("mousePressed", left + width * 0.5, top + 60, button="left", buttons=1, clickCount=1)
    page.mouse("mouseMoved", left + width * 0.6, top + 60, button="left", buttons=1)
    page.mouse("mouseReleased", left + width * 0.6, top + 60, button="left", clickCount=1)
    start, stop, end = page.run(window)
    assert 0.3 * end < start < stop < 0.7 * end
    page.run("byId('chart').focus()")
    page.key("0")
    assert page.run(window)[:2] == [0, end]
    page.key("+")
    start, stop, _ = page.run(window)
    assert stop - start == pytest.approx(end / 2)
    page.key("ArrowRight")
    assert page.run(window)[0] > start
    page.key(".")
    said = page.run("byId('chart-said').textContent")
    assert re.match(r".+ (out|back in|waits for .+)\. ", said)
    assert page.run("!byId('tip').hidden && byId('tip').textContent.length > 10")
    page.key("0")
    assert page.errors == []


@needs_browser
def test_hovering_tells_what_is_there(page: Page) -> None:
    _, focus = sample()
    choose(page, "auto")
    page.run("document.getElementById('chart').scrollIntoView({ behavior: 'instant' })")
    page.settle()
    left, top, width = page.run(
        "(() => { const box = byId('chart').getBoundingClientRect(); return [box.left, box.top, box.width] })()"
    )
    page.mouse("mouseMoved", left + width / 2, top + 80)
    shown = page.run("byId('tip').textContent")
    assert "live" in shown
    assert "free in the budget" in shown
    assert "in spill" in shown
    lane = page.run("page.chart.laneTop(0)")
    page.mouse("mouseMoved", left + width / 2, top + lane + 10)
    names = {op.name.removeprefix("aten::").lstrip("_") for op in focus.problem.trace.ops}
    assert page.run("byId('tip').querySelector('b').textContent") in names


@needs_browser
def test_a_dot_of_the_plot_is_a_button_that_chooses_its_policy(page: Page) -> None:
    comparison, _ = sample()
    dots = "document.querySelectorAll('#pareto .point')"
    ran = [result for result in comparison.results if isinstance(result, Outcome)]
    assert page.run(f"{dots}.length") == len(ran)
    small = min(result.budget_bytes for result in ran)
    budget = json.dumps(format_bytes(small))
    page.run(
        f"[...{dots}].find((dot) => dot.getAttribute('aria-label').startsWith('vdnn: budget ' + {budget}))"
        ".dispatchEvent(new KeyboardEvent('keydown', { key: 'Enter' }))"
    )
    assert page.run("byId('policy').value") == "vdnn"


@needs_browser
def test_dark_and_light_follow_the_system_and_the_button(page: Page) -> None:
    theme = "document.documentElement.dataset.theme"
    ground = "getComputedStyle(document.body).backgroundColor"
    assert page.run(theme) == "light"
    light = page.run(ground)
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    page.settle()
    assert page.run(theme) == "dark"
    assert page.run(ground) != light
    page.run("byId('theme').click()")
    assert page.run(theme) == "light"
    assert page.run(ground) == light


@needs_browser
@pytest.mark.parametrize("width", [380, 800])
def test_a_narrow_window_scrolls_down_only(page: Page, width: int) -> None:
    page.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)
    page.settle()
    assert page.run("document.documentElement.scrollWidth") <= width
    page.call("Emulation.setDeviceMetricsOverride", width=1280, height=900, deviceScaleFactor=1, mobile=False)
    assert page.errors == []


@needs_browser
def test_other_pages_open_without_errors_too(tmp_path: Path) -> None:
    """Names that try to break out, and a comparison without timelines."""
    for name, content in (
        ("nasty", html_report(*nasty())),
        ("alone", html_report(sample()[0], None, note="no timelines: the trace is gone")),
    ):
        path = tmp_path / f"{name}.html"
        path.write_text(content, encoding="utf-8")
        with open_browser() as found:
            found.open(path, dark=True)
            assert found.errors == [], name
            assert found.run("document.title") != "taken"
            assert found.run("document.querySelectorAll('img').length") == 0
            assert found.run("document.querySelectorAll('#results-table tbody tr').length") > 0
            assert found.run("document.getElementById('timeline').hidden") == (name == "alone")
