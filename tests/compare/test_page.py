"""The page and the card of a comparison show the data of the history. No text of the history becomes markup."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from multilock.testing.compare import Report, summary
from multilock.testing.compare.charts import ecdf, scatter, timeline_of
from multilock.testing.compare.history import Event
from multilock.testing.compare.loads import rows_of
from multilock.testing.compare.page import card, page
from multilock.testing.compare.report import Gathered, conclude, gap_of, gather, history_of, read_report
from multilock.testing.compare.summary import host
from multilock.testing.compare.verdicts import cells_of, judge_cycle
from tests import chromium

pytestmark = pytest.mark.timeout(180)  # seconds; a browser is slow while other tests use the processor
HOSTILE = "<script>document.title='taken'</script>\"'><img src=x onerror=alert(1)>\u202e\x00\x1b&amp;</title></style>"
TTL = 2.0
EXAMPLE = Path(__file__).parents[2] / "docs" / "comparison"


def cycle_of(number: int, who: str, scenario: str, *, until: float, b_began: float, at: float = 100.0) -> list[Event]:
    """Return a cycle: A gets the lock at ``at`` and believes for ``until`` seconds that it holds it. B gets the lock
    ``b_began`` seconds after A."""
    over, released = at + until + 0.002, at + b_began + 0.5
    events: list[Event] = [
        {"what": "cycle", "contestant": who, "adapter": "theirs:Lock", "scenario": scenario, "name": HOSTILE,
         "ttl": TTL, "bound": TTL, "seed": "1", "at": at - 1},
        {"what": "fault", "kind": scenario, "pid": 1, "at": at + 0.5, "until": at + b_began + 0.1},
        {"what": "asking", "pid": 1, "at": at - 0.01, "id": "A", "name": HOSTILE},
        {"what": "got", "pid": 1, "at": at, "name": "x", "id": "A", "token": 7, "held": 1},
        {"what": "valid", "pid": 1, "id": "A", "until": at + until},
        {"what": "asking", "pid": 2, "at": at + 0.1, "id": "B", "name": HOSTILE},
        {"what": "held", "pid": 1, "at": at + until, "id": "A"},
        {"what": "lost", "pid": 1, "at": over, "id": "A", "reason": "lost", "due": over},
        {"what": "over", "pid": 1, "at": over, "id": "A", "by": over},
        {"what": "got", "pid": 2, "at": at + b_began, "name": "x", "id": "B", "token": 8, "held": 1},
        {"what": "held", "pid": 2, "at": at + b_began + 0.4, "id": "B"},
        {"what": "release", "pid": 2, "at": released, "id": "B"},
        {"what": "released", "pid": 2, "at": released, "id": "B", "ours": 1},
        {"what": "raised", "pid": 2, "at": released, "id": "C", "why": HOSTILE},
        {"what": "end", "reached": True, "took_place": True, "why": "", "at": at + b_began + 1},
    ]  # fmt: skip
    return [{"cycle": number, **event} for event in events]


def loads_of(number: int, who: str) -> list[list[Event]]:
    cost: list[Event] = [
        {"what": "load", "kind": "cost", "contestant": who, "adapter": "theirs:Lock", "name": "x", "ttl": TTL,
         "seconds": 1.0, "contenders": 1, "processes": 1, "hold": 0.0, "at": 200.0},
        *({"what": "spent", "pid": 3, "at": 200.0 + n / 10, "id": "P0", "acquire": 0.001 * n, "release": 0.001,
           "ping": None if n % 2 else 0.0005} for n in range(1, 9)),
        {"what": "end", "why": "", "at": 201.0},
    ]  # fmt: skip
    contention = [{**cost[0], "kind": "contention", "contenders": 20, "processes": 4}, *(
        {"what": "grant", "pid": 3, "at": 202.0 + n, "id": f"P0.{n}", "asked": 201.0, "until": 202.5 + n, "held": 1,
         "token": n} for n in range(20)), {"what": "end", "why": "", "at": 223.0}]  # fmt: skip
    scale = [{**cost[0], "kind": "scale", "locks": 1000}, {"what": "end", "why": "", "at": 224.0}]
    every = enumerate((cost, contention, scale))
    return [[{"cycle": number + n, **event} for event in events] for n, events in every]


def made_of(
    cycles: list[list[Event]], loads: list[list[Event]], *, control: str = "weak", **more: Any
) -> tuple[Report, Gathered]:
    evidence, line = Gathered(), 1
    for events in (*cycles, *loads):
        evidence.add(events, line)
        line += len(events)
    cells = cells_of((events[0], judge_cycle(events)) for events in cycles)
    names = dict.fromkeys(events[0]["contestant"] for events in (*cycles, *loads))
    columns: list[dict[str, Any]] = [
        {
            "name": name, "url": HOSTILE, "adapters": ["theirs:Lock"], "control": name == control, "ttl": TTL,
            "must_fail": ["pause"] if name == control else [], "bound": TTL, "gone": None, "leftovers": [HOSTILE],
            "not_applicable": [], "versions": {HOSTILE: HOSTILE},
            "capabilities": {"fencing": True, "fencing_scope": HOSTILE},
            "findings": [{"level": "error", "code": "x", "message": HOSTILE, "remedy": HOSTILE}],
        }
        for name in names
    ]  # fmt: skip
    rows = rows_of(loads)
    data = {
        "schema": 1, "multilock": "0", "made_at": "2026-01-02T03:04:05+00:00", "partial": HOSTILE, "command": [HOSTILE],
        "seed": 1, "cycles": 1, "planned": 9, "ttl": TTL, "at_once": 1, "seconds": 12.5,
        "host": {"system": HOSTILE, "python": "3", "cores": 2, "machine": "m"},
        "scenarios": [{"name": name, "says": HOSTILE} for name in ("pause", "partition")],
        "columns": columns, "cells": cells, "loads": rows, **conclude(columns, cells, rows), **more,
    }  # fmt: skip
    return Report(data), evidence


@pytest.fixture(scope="module")
def hostile() -> tuple[Report, Gathered]:
    """Return a report in which every text that a server or a user can choose is markup."""
    cycles = [
        cycle_of(1, HOSTILE, "partition", until=1.5, b_began=1.8),
        cycle_of(2, HOSTILE, "partition", until=1.5, b_began=1.6, at=110.0),
        cycle_of(3, "weak", "partition", until=2.4, b_began=2.0, at=120.0),
    ]
    loads = [*loads_of(4, HOSTILE), [{"cycle": 9, **event} for event in loads_of(0, HOSTILE)[0][:1]]]
    loads[-1].append({"cycle": 9, "what": "end", "why": HOSTILE, "at": 230.0})
    report, evidence = made_of(cycles, loads)
    report.data["columns"][0]["gone"] = HOSTILE
    report.data["void"] = report.data["violations"] = [HOSTILE]
    return report, evidence


class Seen(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.ids: list[str] = []
        self.links: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.links |= {value or "" for name, value in attrs if name == "href"}


def test_text_from_outside_is_escaped_on_the_page(hostile: tuple[Report, Gathered]) -> None:
    seen = Seen(page(*hostile))
    assert not seen.tags & {"script", "img", "iframe", "object", "link", "base", "form"}
    assert not {name for name in seen.attributes if name.startswith("on") or name in ("style", "src", "srcset")}
    drawn = ElementTree.fromstring(card(*hostile))  # this also checks that the card is XML
    assert {each.tag.rpartition("}")[2] for each in drawn.iter()} <= {
        "svg", "title", "style", "rect", "text", "tspan", "path",
    }  # fmt: skip


def test_text_from_outside_cannot_change_the_writing_direction(hostile: tuple[Report, Gathered]) -> None:
    assert not {"\u202e", "\x00", "\x1b"} & {*page(*hostile), *card(*hostile)}


def test_each_link_of_the_page_leads_to_something_on_it_or_beside_it(hostile: tuple[Report, Gathered]) -> None:
    seen = Seen(page(*hostile))
    assert len(seen.ids) == len(set(seen.ids))
    assert {"cycle-2", "cycle-3", "fault-partition"} <= set(seen.ids)
    assert {link.removeprefix("#") for link in seen.links if link.startswith("#")} <= set(seen.ids)
    assert {link for link in seen.links if not link.startswith("#")} == {"report.json", "history.jsonl"}


def test_each_link_of_the_example_in_the_docs_leads_somewhere() -> None:
    seen = Seen((EXAMPLE / "report.html").read_text(encoding="utf-8"))
    beside = {link for link in seen.links if not link.startswith("#")}
    assert len(beside) == 2
    assert [link for link in beside if not (EXAMPLE / link).exists()] == []
    assert {link.removeprefix("#") for link in seen.links - beside} <= set(seen.ids)
    drawn = Seen(page(read_report(EXAMPLE), gather(history_of(EXAMPLE))))
    assert drawn.links == seen.links, "draw it again: multilock compare --page docs/comparison"


def test_the_timeline_shows_the_worst_cycle(hostile: tuple[Report, Gathered]) -> None:
    _, evidence = hostile
    worst = evidence.worst[HOSTILE, "partition"]
    assert worst.events[0]["cycle"] == 2
    assert (worst.first_line, worst.last_line) == (16, 30)
    assert worst.gap is not None
    assert worst.gap.of == "lease"
    assert worst.gap.seconds == pytest.approx(0.1)
    assert {bar.kind for bar in timeline_of(worst).bars} >= {"belief-A", "belief-B", "valid", "fault"}


def test_two_simultaneous_believers_are_shown_and_no_others(hostile: tuple[Report, Gathered]) -> None:
    _, evidence = hostile
    weak = evidence.worst["weak", "partition"]
    assert gap_of(weak.events) is not None
    assert [bar.kind for bar in timeline_of(weak).bars].count("overlap") == 1
    assert "both believed for 400 ms" in page(*hostile)
    later = copy.deepcopy(evidence.worst[HOSTILE, "partition"].events)
    for event in later:
        if event.get("id") == "A" and event["what"] != "asking":
            event.update({key: event[key] + 50 for key in ("at", "until", "by", "due") if key in event})
    assert gap_of(later) is None


def test_a_third_simultaneous_believer_has_a_lane_and_a_red_area(hostile: tuple[Report, Gathered]) -> None:
    _, evidence = hostile
    cycle = evidence.worst["weak", "partition"]
    events = [event for event in cycle.events if event.get("id") != "C"]
    third = [{**event, "id": "C"} for event in events if event.get("id") == "B"]
    drawn = timeline_of(dataclasses.replace(cycle, events=[*events[:-1], *third, events[-1]]))
    assert [bar.says.partition(":")[0] for bar in drawn.bars if bar.kind == "overlap"] == [
        "both believed",
        "A and C both believed",
        "B and C both believed",
    ]
    assert "belief-C" in {bar.kind for bar in drawn.bars}


def test_the_card_shows_how_long_both_believed_if_there_is_room(hostile: tuple[Report, Gathered]) -> None:
    assert "✗ 1/1 400ms" in card(*hostile)


def test_a_void_or_partial_report_states_so_first(hostile: tuple[Report, Gathered]) -> None:
    hostile_report, evidence = hostile
    report = Report({**hostile_report.data, "exit_code": 3})
    text = page(report, evidence)
    assert text.index("VOID: this run has shown nothing") < text.index('id="verdicts"')
    assert text.index("Partial:") < text.index('id="verdicts"')
    fine, _ = made_of(
        [cycle_of(1, "ours", "partition", until=1.5, b_began=1.8)], [], partial=None, void=[], exit_code=0
    )
    fine.data["violations"] = []
    assert "VOID" not in page(fine, evidence).partition('id="verdicts"')[0]


def test_a_run_that_found_a_broken_promise_is_never_called_void() -> None:
    report, evidence = made_of(
        [cycle_of(1, "ours", "pause", until=2.4, b_began=2.0), cycle_of(2, "weak", "pause", until=1.5, b_began=1.8)], []
    )
    assert (report.exit_code, report.void != []) == (1, True)
    assert "VOID: this run has shown nothing" not in page(report, evidence)
    said = [text for text, _ in summary.notes(report)]
    assert said[0].startswith("ours, pause, cycle 1: ")
    assert not [text for text in said if text.startswith("VOID")]
    assert [text for text in said if text.startswith("not shown: ")]


def test_an_unknown_cell_has_its_reason_in_the_summary() -> None:
    events = cycle_of(1, "ours", "pause", until=1.5, b_began=1.8)
    events[-1] = {**events[-1], "took_place": False, "reached": False, "why": "A does not renew"}
    report, _ = made_of([events], [])
    assert "- ? ours, pause, 1 of 1 cycles: A does not renew\n" in summary.markdown(report)


def test_a_control_that_did_not_fail_is_named_in_its_row() -> None:
    report, evidence = made_of(
        [cycle_of(1, "ours", "pause", until=1.5, b_began=1.8), cycle_of(2, "weak", "pause", until=1.5, b_began=1.8)], []
    )
    assert "✗ VOID: it did not fail" in page(report, evidence)
    report, evidence = made_of(
        [cycle_of(1, "ours", "pause", until=1.5, b_began=1.8), cycle_of(2, "weak", "pause", until=2.5, b_began=1.8)], []
    )
    assert "✓ it failed, as it must" in page(report, evidence)


def test_a_report_without_a_cycle_has_a_page_too() -> None:
    report, evidence = made_of([], loads_of(1, "ours"), void=[], exit_code=0, violations=[])
    text = page(report, evidence)
    assert "No cycle was run" in text
    assert "Many locks held by one client" in text
    ElementTree.fromstring(card(report, evidence))
    ElementTree.fromstring(card(Report({**report.data, "loads": [], "columns": []}), Gathered()))


def test_a_control_is_in_the_same_throughput_chart_as_its_backend() -> None:
    report, evidence = made_of([], [*loads_of(1, "ours"), *loads_of(4, "weak")], void=[], exit_code=0, violations=[])
    for row in report.data["loads"]:
        row["adapter"] = "ours:Blocking" if row["contestant"] == "ours" else "theirs:Naive"
    assert page(report, evidence).count("<h4>Grants a second</h4>") == 1


def test_a_repeated_token_is_counted_as_a_regression() -> None:
    events = cycle_of(1, "ours", "pause", until=1.5, b_began=1.8)
    events[9]["token"] = 6
    report, evidence = made_of([events], [])
    assert [fine for _, fine in evidence.tokens["ours"]] == [True, False]
    assert "1 regressions" in page(report, evidence)


def test_accepted_and_refused_fenced_writes_are_shown_beside_the_tokens() -> None:
    events = cycle_of(1, "ours", "pause", until=1.5, b_began=1.8)
    for number, (at, token, taken) in enumerate([(100.1, 7, 1), (101.9, 8, 1), (102.0, 7, 0)]):
        wrote = {"cycle": 1, "what": "wrote", "pid": 1, "at": at, "id": "A", "token": token, "value": number}
        events.insert(-1, {**wrote, "taken": taken})
    report, evidence = made_of([events], [])
    assert '<td class="number">2</td><td class="number">✓ 0</td><td class="number">2</td><td class="number">1</td>' in (
        page(report, evidence)
    )


@pytest.mark.parametrize("held", [1, 0])
def test_a_regression_is_shown_exactly_where_the_verdict_names_one(held: int) -> None:
    events = cycle_of(1, "ours", "pause", until=1.5, b_began=1.8)
    events[9] |= {"token": 6, "held": held}  # with held=0, the lease of B had expired before B received it
    del events[10]
    load = loads_of(2, "ours")[1]
    load[6] |= {"token": 1, "held": held}
    load[7]["what"] = "served"
    load[7] |= {"token": 1, "held": held}
    report, evidence = made_of([events], [load])
    told = [what for what in report.violations if " came after " in what]
    assert len(told) == 3 * held
    assert sum(not grew for _, grew in evidence.tokens["ours"]) == len(told)
    rows = [*report.data["cells"], report.data["loads"][0]]
    assert [row["token_regressions"] for row in rows] == [held, 2 * held]


def test_a_chart_stays_small_however_many_points_it_has() -> None:
    dice = random.Random(1)
    points = [(dice.uniform(0, 3600), dice.lognormvariate(-6, 1)) for _ in range(40_000)]
    seconds = [value for _, value in points]
    plot = scatter("x", "s", [(0, "x", points)], end=3600, low=min(seconds), high=max(seconds))
    assert len(plot.series[0].path) < 500_000
    assert len(ecdf("x", "s", [(0, "x", seconds)]).series[0].path) < 40_000


def test_the_known_properties_of_the_machine_are_shown(tmp_path: Path) -> None:
    assert {"cpu", "memory"}.isdisjoint(host(tmp_path))
    (tmp_path / "cpuinfo").write_text(
        "processor\t: 0\nmodel name\t: Abacus <9>\nprocessor\t: 1\nmodel name\t: Abacus <9>\n"
    )
    (tmp_path / "meminfo").write_text("MemTotal:        8123456 kB\nMemFree:          123456 kB\n")
    its = host(tmp_path)
    assert (its["cpu"], its["memory"]) == ("Abacus <9>", 8123456 * 1024)
    its |= {"system": "Linux", "cores": 2}
    report, evidence = made_of([], [], host=its)
    assert "<dd>Linux, 2 cores of Abacus &lt;9&gt;, 7.7 GiB of memory</dd>" in page(report, evidence)
    assert "Linux, 2 cores of Abacus <9>, 7.7 GiB of memory, seed 1" in summary.markdown(report)


# ---- in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[chromium.Browser]:
    with chromium.running() as browser:
        yield browser


@pytest.fixture(scope="module")
def address(hostile: tuple[Report, Gathered], tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page(*hostile), encoding="utf-8")
    return path.as_uri()


@pytest.mark.parametrize("scheme", chromium.SCHEMES)
@pytest.mark.parametrize("width", chromium.WIDTHS)
def test_the_page_fits_its_width_has_no_errors_and_loads_nothing(
    browser: chromium.Browser, address: str, width: int, scheme: str
) -> None:
    opens_well(browser, address, width, scheme)


def opens_well(browser: chromium.Browser, address: str, width: int, scheme: str) -> None:
    """Check that the page fits with all its details open, has no errors, sends no other request, and is light or
    dark."""
    opened = browser.open(address, width, scheme)
    assert opened.errors == []
    assert opened.requests == [address]
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run("document.title").startswith("Lock backends compared")
    browser.run("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert browser.run("document.documentElement.scrollWidth") <= width
    paper = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") is (scheme == "light")


def test_text_of_twice_the_size_fits_too(browser: chromium.Browser, address: str) -> None:
    browser.open(address, 390, "light")
    browser.run("document.documentElement.style.fontSize = '200%'")
    assert browser.run("document.documentElement.scrollWidth") <= 390


def test_the_policy_of_the_page_blocks_every_request(browser: chromium.Browser, address: str) -> None:
    browser.open(address, 1280, "light")
    refused = browser.run(
        """new Promise(done => {
            document.addEventListener('securitypolicyviolation', event => done(event.effectiveDirective));
            document.body.appendChild(new Image()).src = 'http://127.0.0.1:9/x';
        })"""
    )
    assert refused == "img-src"
    assert browser.run("[...document.scripts].length") == 0


def test_each_verdict_and_timeline_can_be_reached_by_keyboard(browser: chromium.Browser, address: str) -> None:
    browser.open(address, 1280, "light")
    reached = []
    for _ in range(16):
        browser.press("Tab")
        reached.append(browser.run("document.activeElement.getAttribute('href') || document.activeElement.className"))
    assert reached[0] == "#verdicts"
    assert "#cycle-2" in reached
    assert "scroll" in reached
    table = browser.run("document.querySelector('.grid').outerHTML")
    assert '<th scope="col">' in table
    assert '<th scope="row">' in table
    assert "<caption>" in table


def test_a_timeline_can_be_magnified_and_has_a_link(browser: chromium.Browser, address: str) -> None:
    browser.open(f"{address}#cycle-2", 1280, "light")
    assert browser.run("document.querySelector(':target').id") == "cycle-2"
    wide = "document.querySelector('#cycle-2 .time').getBoundingClientRect().width"
    before = browser.run(wide)
    browser.run("document.querySelector('#cycle-2 .z20').click()")
    assert browser.run(wide) == pytest.approx(20 * before)
    assert browser.run("document.documentElement.scrollWidth") <= 1280


def test_the_card_is_a_picture_of_its_size(
    browser: chromium.Browser, hostile: tuple[Report, Gathered], tmp_path: Path
) -> None:
    path = tmp_path / "card.svg"
    path.write_text(card(*hostile), encoding="utf-8")
    opened = browser.open(path.as_uri(), 1280, "dark")
    assert (opened.errors, opened.requests) == ([], [path.as_uri()])
    size = browser.run("(box => [box.width, box.height])(document.documentElement.getBoundingClientRect())")
    assert size == [1200, 630]
    widest = "Math.max(...[...document.querySelectorAll('text')].map(each => each.getBBox().x + each.getBBox().width))"
    assert browser.run(widest) <= 1200
