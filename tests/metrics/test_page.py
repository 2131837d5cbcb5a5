"""The page in a real browser, against documents that a test writes; then against a real job's agent."""

import base64
import hashlib
import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from elastic_hieravg.metrics.attention import attention
from elastic_hieravg.metrics.status_reading import read_status
from tests.elastic.jobs import HIERAVG, running_job
from tests.metrics import documents
from tests.metrics.browsers import PHONE, WIDE, chromium, watched
from tests.metrics.page_server import PAGE, SILENCE, PageServer

pytestmark = pytest.mark.needs("chromium", apt="chromium")

CONTRAST_MIN = 4.5
# Longer than two polls of the page.
SOME_POLLS_S = 2.5
RENDER_MS_MAX = 1000
PICTURE_BYTES_MAX = 120_000
# From the death of a node to its being shown as lost, however busy the machine is.
SHOWN_WITHIN_S = 30.0
ADDRESS = re.compile(r"metrics and status of this node: (http://\S+)/$", re.MULTILINE)
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture
def server() -> Iterator[PageServer]:
    found = PageServer(documents.small_job())
    yield found
    found.close()


def row(page: Page, name: str) -> Locator:
    """The row of a node, a place or a worker."""
    return page.locator("#nodes tr").filter(has=page.get_by_role("rowheader", name=name, exact=True))


def findings(page: Page) -> list[tuple[str, str]]:
    """What the page says needs attention, once it has something to say."""
    expect(page.locator("#attention > *")).to_have_count(1)
    return [
        (each.locator(".badge").inner_text(), each.locator("span").nth(1).inner_text())
        for each in page.locator("#attention li").all()
    ]


# --- the file itself ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tag", ["style", "script"])
def test_only_the_style_and_the_script_of_the_page_are_allowed(tag: str) -> None:
    text = PAGE.read_text()
    (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    assert f"{tag}-src 'sha256-{digest}';" in text, f"write 'sha256-{digest}' into the page's policy for {tag}"


def test_the_page_is_whole_by_itself_and_parses_no_text_as_html() -> None:
    text = PAGE.read_text()
    assert set(re.findall(r"https?://[^\"' ]*", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\ssrc=|@import|url\(|<iframe|<form", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(", text)


def test_the_readme_shows_a_small_picture_of_it() -> None:
    root = Path(__file__).parents[2]
    (path,) = re.findall(r"!\[[^]]*]\(([^)]*status-page[^)]*)\)", (root / "README.md").read_text())
    assert 0 < (root / path).stat().st_size < PICTURE_BYTES_MAX


# --- what it shows --------------------------------------------------------------------------------------------


def test_shows_the_tree_the_levels_the_events_and_the_values(browser: Browser, server: PageServer) -> None:
    with watched(browser, server.url) as found:
        page = found.page
        expect(page.get_by_role("heading", level=1)).to_have_text("demo")
        expect(page.locator("#attention")).to_have_text("Nothing.")
        expect(page.locator(".figures")).to_contain_text("1,234")
        expect(page.locator(".figures")).to_contain_text("97 %")
        expect(page.locator(".figures")).to_contain_text("at least 1, at most 4")
        names = page.locator("#nodes tbody th").all_inner_texts()
        assert [name.split("\t")[0].strip() for name in names] == [
            "zone z1 2 training",
            "rack r1 1 training",
            "a",
            "worker 0",
            "worker 1",
            "rack r2 1 training",
            "b",
            "worker 0",
            "worker 1",
            "zone z2 1 training",
            "rack r3 1 training",
            "c",
            "worker 0",
            "worker 1",
        ]
        expect(row(page, "a")).to_contain_text("training")
        expect(row(page, "a")).to_contain_text("19.5 ms")
        assert page.get_by_role("img", name="step time from").count() == 3
        expect(page.locator("#levels tr.level")).to_have_count(3)
        widest = page.locator("#levels tr.level").filter(has_text="global")
        for text in (
            "64 steps",
            "step 1,216",
            "41 ms",
            "247 kB",
            "between zones",
            "inter_zone",
            "1,280, in 46",
        ):
            expect(widest).to_contain_text(text)
        assert page.locator("#levels tr.groups").nth(1).locator("li").all_inner_texts() == [
            "a b ranks 0-3",
            "c ranks 4-5",
        ]
        newest = page.locator("#events li").first
        for text in ("1 min 5 s ago", "join", "gen. 7", "c joined", "came: c"):
            expect(newest).to_contain_text(text)
        expect(page.locator("#values")).to_contain_text("1.23457")
        found.check()


def test_who_starts_ended_or_left_needs_no_attention(browser: Browser, server: PageServer) -> None:
    server.answer = documents.calm_job()
    with watched(browser, server.url) as found:
        page = found.page
        expect(page.locator("#attention")).to_have_text("Nothing.")
        expect(row(page, "c")).to_contain_text("left")
        assert "1,2" not in row(page, "c").inner_text(), "nothing of what it told before it left"
        expect(page.locator("#nodes tr.reason")).to_have_text("left for 12 s: it left on purpose")
        expect(page.locator("#nodes tr.worker .starting")).to_have_count(2)
        expect(page.locator("#levels thead")).to_contain_text("A node sent")
        assert page.locator("#events .badge").all_inner_texts() == ["join", "lost", "start"]
        page.get_by_label("only nodes that need attention").check()
        expect(page.locator("#nodes")).to_contain_text("No node needs attention.")
        found.check()


def test_follows_a_loss_a_slow_node_a_hold_and_a_return(browser: Browser, server: PageServer) -> None:
    with watched(browser, server.url) as found:
        page = found.page
        expect(row(page, "c")).to_contain_text("training")
        server.answer = documents.lost_job("c")
        expect(row(page, "c")).to_contain_text("lost")
        expect(page.locator("#nodes tr.reason")).to_have_text("lost for 12 s: its process ended")
        expect(page.locator("#attention")).to_contain_text("Node c (zone z2, rack r3) is lost for 12 s")
        expect(page.locator("#levels tr.level")).to_have_count(2)
        expect(page.locator("#levels")).to_contain_text("they are one level, zone, every 16 steps")
        expect(page.locator("#job")).to_contain_text("Generation 8: lost c: its process ended")
        expect(page).to_have_title("(1) demo")
        server.answer = documents.troubled_job()
        expect(row(page, "b")).to_contain_text("slow")
        expect(page.locator("#levels tr.groups").first).to_contain_text("b slow")
        server.answer = documents.held_job()
        expect(page.locator("#attention")).to_contain_text("The job is held: level size-2")
        server.answer = documents.small_job()
        expect(row(page, "c")).to_contain_text("training")
        expect(page.locator("#nodes tr.reason")).to_have_count(0)
        expect(page.locator("#levels tr.level")).to_have_count(3)
        expect(page.locator("#attention")).to_have_text("Nothing.")
        found.check()


def test_says_since_when_the_agent_does_not_answer_and_comes_back(browser: Browser, server: PageServer) -> None:
    with watched(browser, server.url) as found:
        page = found.page
        banner = page.locator("#banner")
        expect(row(page, "a")).to_be_visible()
        expect(banner).to_be_hidden()
        server.close()
        expect(banner).to_contain_text(re.compile(r"agent of node a does not answer since \d\d:\d\d:\d\d"))
        expect(banner).to_contain_text("it cannot be reached")
        # What it said last stays to be read.
        expect(row(page, "a")).to_be_visible()
        expect(page).to_have_title("no answer: demo")
        server.open()
        expect(banner).to_be_hidden()
        expect(page.locator("#live")).to_have_text(re.compile(r"live, \d\d:\d\d:\d\d"))
        for answer, told in (
            (503, "it says 503"),
            (b"<html>", "no JSON"),
            ({"version": 2}, "it speaks version 2"),
            ([], "it speaks version ?"),
            (SILENCE, "no answer within 5 s"),
        ):
            server.answer = answer
            expect(banner).to_contain_text(told)
        server.close()
        server.answer = documents.lost_job("b")
        server.open()
        expect(banner).to_be_hidden()
        expect(row(page, "b")).to_contain_text("lost")
        found.check(may_be_away=True)


def test_asks_nobody_while_nobody_looks(browser: Browser, server: PageServer) -> None:
    with watched(browser, server.url) as found:
        page = found.page
        expect(row(page, "a")).to_be_visible()
        for is_hidden in (True, False):
            page.evaluate(
                """(isHidden) => {
                    Object.defineProperty(document, "hidden", {configurable: true, get: () => isHidden});
                    document.dispatchEvent(new Event("visibilitychange"));
                }""",
                is_hidden,
            )
            if is_hidden:
                page.wait_for_timeout(200)
                asked = server.asked["/status"]
                page.wait_for_timeout(SOME_POLLS_S * 1000)
                assert server.asked["/status"] == asked
                server.answer = documents.lost_job("b")
        expect(row(page, "b")).to_contain_text("lost")
        found.check()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [WIDE, PHONE], ids=["wide", "phone"])
def test_is_readable_by_day_by_night_and_on_a_phone(
    browser: Browser, server: PageServer, scheme: str, viewport: dict[str, int]
) -> None:
    server.answer = documents.troubled_job()
    with watched(browser, server.url, color_scheme=scheme, viewport=viewport) as found:
        page = found.page
        expect(row(page, "a")).to_be_visible()
        seen = page.evaluate(CONTRASTS)
        assert len(seen["texts"]) > 100
        assert (seen["ground"] < 0.2) == (scheme == "dark")
        assert not [each for each in seen["texts"] if each["ratio"] < CONTRAST_MIN]
        assert not page.evaluate("document.documentElement.scrollWidth > innerWidth"), "it scrolls sideways"
        found.check()


# Every text that is shown, with its contrast to the first ground below it that is not transparent.
CONTRASTS = """() => {
    const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
    const light = ([r, g, b]) => {
        const part = (x) => (x /= 255) <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
        return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
    };
    const ground = (element) => {
        for (let at = element; at; at = at.parentElement) {
            const found = channels(getComputedStyle(at).backgroundColor);
            if (found.length < 4 || found[3] === 1) return light(found);
        }
        return 1;
    };
    const texts = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const text = walker.currentNode.data.trim(), element = walker.currentNode.parentElement;
        if (!text || !element.checkVisibility() || element.closest("script, title")) continue;
        const pair = [light(channels(getComputedStyle(element).color)), ground(element)].sort((a, b) => b - a);
        texts.push({text, ratio: (pair[0] + 0.05) / (pair[1] + 0.05)});
    }
    return {texts, ground: ground(document.body)};
}"""


def test_a_large_job_is_compact_and_unfolds(browser: Browser, server: PageServer) -> None:
    server.answer = documents.large_job()
    with watched(browser, server.url) as found:
        page = found.page
        # Racks in which all is well are folded; three have something to be seen.
        expect(page.locator("#nodes tr.place")).to_have_count(4 + 16)
        expect(page.locator("#nodes tr.node")).to_have_count(3 * 4)
        expect(page.locator("#nodes tr.worker")).to_have_count(0)
        expect(page.locator("#nodes tr.place").nth(1)).to_have_text(
            "rack r0 4 training, 19.5 ms to 22.4 ms a step"
        )
        assert [word for word, _ in findings(page)] == ["lost", "cost", "slow"]
        expect(page.locator("#levels li:visible")).to_have_count(8 + 4 + 1)
        page.get_by_role("button", name="rack r0", exact=True).click()
        expect(page.locator("#nodes tr.node")).to_have_count(4 * 4)
        page.get_by_role("button", name="node-2", exact=True).click()
        expect(page.locator("#nodes tr.worker")).to_have_count(8)
        page.get_by_text("and 56 more groups").click()
        # It stays as the reader put it, over documents to come.
        asked = server.asked["/status"]
        server.answer["step"] = 99_999
        expect(page.locator(".figures")).to_contain_text("99,999")
        assert server.asked["/status"] > asked
        expect(page.locator("#nodes tr.worker")).to_have_count(8)
        expect(page.locator("#levels li:visible")).to_have_count(64 + 4 + 1)
        assert page.evaluate("document.activeElement.textContent") == "and 56 more groups"
        page.get_by_role("button", name="unfold all").click()
        expect(page.locator("#nodes tr.node")).to_have_count(64)
        expect(page.locator("#nodes tr.worker")).to_have_count(63 * 8)
        page.get_by_role("button", name="zone z0").click()
        expect(page.locator("#nodes tr.node")).to_have_count(48)
        page.get_by_label("only nodes that need attention").check()
        expect(page.locator("#nodes tr.node")).to_have_count(3)
        render_ms = page.evaluate(
            "() => { const from = performance.now(); render(); return performance.now() - from; }"
        )
        assert render_ms < RENDER_MS_MAX
        found.check()


def test_text_of_the_document_is_text_on_the_page(browser: Browser, server: PageServer) -> None:
    document = documents.troubled_job()

    def spoil(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: spoil(each) for key, each in value.items()}
        if isinstance(value, list):
            return [spoil(each) for each in value]
        return f"{value} {HOSTILE}" if isinstance(value, str) else value

    spoilt = spoil(document) | {"values": {HOSTILE: 1.0}}
    for index, each in enumerate(spoilt["nodes"]):
        each["state"] = document["nodes"][index]["state"]
        each["labels"] = {"zone": HOSTILE, "rack": "javascript:alert(1)"}
    server.answer = spoilt
    with watched(browser, server.url) as found:
        page = found.page
        expect(page.get_by_role("heading", level=1)).to_have_text(f"demo {HOSTILE}")
        for part in ("#attention", "#job", "#nodes", "#levels", "#events", "#values"):
            expect(page.locator(part)).to_contain_text(HOSTILE)
        assert page.locator("img, iframe, main script").count() == 0
        assert page.evaluate(
            """[...document.querySelectorAll("*")].every((each) => !each.hasAttribute("onerror"))"""
        )
        found.check()


def test_half_a_document_breaks_nothing(browser: Browser, server: PageServer) -> None:
    with watched(browser, server.url) as found:
        page = found.page
        expect(row(page, "a")).to_be_visible()
        for index, document in enumerate(documents.hollow_documents()):
            shown = page.evaluate(SHOW, json.dumps(document | {"run_id": f"hollow {index}"}))
            assert shown.startswith(f"hollow {index}")
            assert not re.search(r"\b(undefined|null|NaN|Infinity|\[object)\b", shown), shown
        server.answer = documents.lost_job("c")
        expect(row(page, "c")).to_contain_text("lost")
        found.check()


# Show a document at once, and tell what is shown: the next one is only a second away.
SHOW = "(text) => { newest = read(JSON.parse(text)); render(); return document.body.innerText; }"


def test_a_real_job_loses_a_node_and_gets_it_back(browser: Browser, tmp_path: Path) -> None:
    with running_job(
        tmp_path / "job", flags=["--metrics-port=auto"], hierarchy="node=4,zone=8,global=16"
    ) as job:
        job.start("a", flags=["--label=zone=z1"])
        job.wait_for("a starts", lambda: bool(job.lines()))
        (url,) = ADDRESS.findall(job.log("a"))
        job.start("b", flags=["--label=zone=z1"])
        job.start("c", flags=["--label=zone=z2"])
        job.await_together("a", "b", "c")
        with watched(browser, url) as found, job.surviving("a", "b"):
            page = found.page
            for name in "abc":
                expect(row(page, name)).to_contain_text("training")
            expect(page.locator("#nodes tr.worker")).to_have_count(6)
            expect(page.locator("#levels tr.level th")).to_have_text(["node", "zone", "global"])
            expect(page.locator("#levels")).to_contain_text("committed")
            assert page.locator("#attention").get_by_text("is lost").count() == 0
            killed_s = time.monotonic()
            job.kill("c")
            expect(row(page, "c")).to_contain_text("lost")
            assert time.monotonic() - killed_s < SHOWN_WITHIN_S
            expect(page.locator("#attention")).to_contain_text("Node c (zone z2) is lost")
            # All of it is one zone now.
            expect(page.locator("#levels tr.level th")).to_have_text(["node", "zone"])
            expect(page.locator("#levels .notes")).to_contain_text("level global has the same groups as zone")
            expect(page.locator("#events li").first).to_contain_text("left: c")
            job.start("c", flags=["--label=zone=z2"])
            expect(row(page, "c")).to_contain_text("training")
            expect(page.locator("#levels tr.level th")).to_have_text(["node", "zone", "global"])
            expect(page.locator("#events li").first).to_contain_text("came: c")
            expect(page.locator("#attention").get_by_text("is lost")).to_have_count(0)
            job.await_together("a", "b", "c")
            found.check()
        told = subprocess.run(
            [HIERAVG, "status", "--url", url], capture_output=True, text=True, timeout=60, check=True
        )
        assert re.search(r"^    c +training", told.stdout, re.MULTILINE), told.stdout
        job.finish()
        assert job.faults["node killed"] == 1


def test_the_page_and_the_terminal_find_the_same(browser: Browser, server: PageServer) -> None:
    written = [
        documents.small_job(),
        documents.lost_job("b"),
        documents.troubled_job(),
        documents.held_job(),
        documents.calm_job(),
        documents.large_job(),
        *documents.hollow_documents(),
    ]
    with watched(browser, server.url) as found:
        expect(row(found.page, "a")).to_be_visible()
        total = 0
        for document in written:
            ours = [[each.severity, each.word, each.text] for each in attention(read_status(document))]
            total += len(ours)
            theirs = found.page.evaluate("(text) => attention(read(JSON.parse(text)))", json.dumps(document))
            assert theirs == ours
        assert total > 20
        found.check()
