"""The status page: what it shows in a real browser, to whom, and what it never does."""

from __future__ import annotations

import re
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from hashlib import sha256
from html.parser import HTMLParser
from typing import Any

import pytest

from mlx_lm_kvcache_plugin.web import page
from tests.web import figures
from tests.web.browser import WAIT_SECONDS, Browser, opened
from tests.web.figures import Stats, node
from tests.web.status_server import StatusServer

LARGEST_PAGE_BYTES = 32 << 10

LOOKS = [(1280, 900, "light"), (1280, 900, "dark"), (390, 844, "light"), (390, 844, "dark")]
NARROW = 320

TAB, ENTER, ESCAPE, SPACE = "\ue004", "\ue007", "\ue00c", " "

MARKUP = "<img src=x onerror='window.stolen = 1'></bdi><script>window.stolen = 1</script>"
OVERRIDE = "\u202egnihtyna \u2066"
LONG_WORD = "W" * 10_000

CHATS = "#tree > li > ul > li > details > ul > li"
"""The branches below the first nodes."""

Show = Callable[..., Browser]


class Inline(HTMLParser):
    """What a page has that a policy must allow: text of styles and scripts, and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: dict[str, list[str]] = {"style": [], "script": []}
        self.attributes: list[tuple[str, str]] = []
        self._tag = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self._tag = tag
        self.attributes += [(name, value or "") for name, value in attributes]

    def handle_data(self, data: str) -> None:
        if self._tag in self.texts:
            self.texts[self._tag].append(data)

    def handle_endtag(self, tag: str) -> None:
        self._tag = ""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with opened() as browser:
        yield browser


@pytest.fixture
def server() -> Iterator[StatusServer]:
    server = StatusServer(figures.busy())
    with server.listening():
        yield server


@pytest.fixture
def show(browser: Browser, server: StatusServer) -> Iterator[Show]:
    """Opens the page on some statistics. Whatever a test does then, nothing but the server is
    asked, and the console stays empty."""

    def show(stats: Stats, width: int = 1280, height: int = 900, scheme: str = "light") -> Browser:
        server.stats_answer = stats
        browser.looks(width, height, scheme)
        browser.open(server.origin + "/cache")
        browser.shows("#about", "Version")
        return browser

    yield show
    browser.leave()
    ours = {server.origin + path for path in ("/cache", "/v1/cache/stats", "/v1/cache")}
    assert {url.partition("?")[0] for url in browser.requests()} <= ours
    assert browser.complaints() == []


def poll(browser: Browser) -> None:
    """Make the page ask now, as it does when it comes into view, instead of in two seconds."""
    browser.run("document.dispatchEvent(new Event('visibilitychange'))")


def show_next(browser: Browser, server: StatusServer, stats: Stats) -> None:
    """Wait until the page shows other statistics."""
    version = f"0.1.{len(server.asked)}"
    server.stats_answer = {**stats, "version": version}
    poll(browser)
    browser.shows("#about", f"Version {version},")


def unfold(browser: Browser) -> None:
    browser.run(
        "document.querySelectorAll('details').forEach(each => each.open = true);"
        "document.querySelectorAll('.more:not([hidden])').forEach(each => each.click())"
    )


def hostile() -> Stats:
    """Statistics in which every text that others can choose is a bad one."""
    bad = f"{MARKUP} {OVERRIDE}"
    below = node(LONG_WORD, 128, node(bad, 128), node(LONG_WORD, 256))
    for _ in range(6):
        below = node(bad, 128, below, node("x", 128))
    stats = figures.with_disk()
    stats["models"] = [{**each, "model": LONG_WORD[:300] + bad} for each in stats["models"]]
    stats["last_misses"] = [figures.miss(1.0, 300, 12, "diverged", f"{LONG_WORD[:300]} {bad}")]
    stats["disk"]["folder"] = "/" + LONG_WORD[:300]
    stats["memory"]["origin"] = bad
    return {
        **stats,
        "errors": {"fetch": 1},
        "last_error": f"fetch: {LONG_WORD[:300]} {bad}",
        "sequences": figures.tree(below, model=LONG_WORD[:300] + bad),
    }


class TestPolicy:
    """What the browser is told to keep the page from."""

    def test_nothing_but_its_own_script_and_style_may_run(self) -> None:
        """The policy has the hash of the one script and the one style, and no way around them."""
        texts = Inline(page.body().decode()).texts
        policy = page.headers()["Content-Security-Policy"]
        for tag, (text,) in texts.items():
            digest = b64encode(sha256(text.encode()).digest()).decode()
            assert f"{tag}-src 'sha256-{digest}'" in policy.split("; ")
        assert "default-src 'none'" in policy and "connect-src 'self'" in policy
        assert "unsafe" not in policy

    def test_nothing_is_inline_that_a_hash_cannot_allow(self) -> None:
        """No element has a style or a script as an attribute, and none leads elsewhere."""
        attributes = Inline(page.body().decode()).attributes
        assert not [name for name, _ in attributes if name == "style" or name.startswith("on")]
        addresses = {value for name, value in attributes if name in {"href", "src"}}
        assert {each for each in addresses if not each.startswith("data:image/svg+xml,")} == {
            "v1/cache/stats",
            "metrics",
        }

    def test_no_other_page_may_hold_it(self) -> None:
        """It can be neither framed, kept, nor reached from a page that opened it."""
        headers = page.headers()
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        assert headers["X-Frame-Options"] == "DENY"
        assert headers["Cache-Control"] == "no-store"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cross-Origin-Opener-Policy"] == "same-origin"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"

    def test_it_is_small(self) -> None:
        """It is read by every browser anew, from a server that has better things to do."""
        assert len(page.body()) < LARGEST_PAGE_BYTES


class TestFigures:
    """What the page says."""

    def test_memory(self, show: Show) -> None:
        """Used, limit and share are said in words, to the eye and to a screen reader."""
        seen = show(figures.busy())
        words = "1.2 GiB of 4.0 GiB, 31%"
        assert seen.text("#memory-used") + " " + seen.text("#memory-limit") == words
        meter = "return document.querySelector('#memory-gauge').getAttribute(arguments[0])"
        assert seen.run(meter, "aria-valuetext") == words
        assert seen.run(meter, "aria-valuenow") == "31"
        assert seen.text("#origin") == "Limit: a fixed limit"
        held = seen.text("#held").split("\n")
        assert [held[held.index(name) + 1] for name in ("Stored tokens", "Sequences")] == [
            "1,258,400",
            "214",
        ]

    def test_models_are_told_apart_if_there_are_several(self, show: Show) -> None:
        """Each has its share, and says whether it is loaded; one alone needs no table."""
        both = figures.busy()
        seen = show(both)
        assert rows(seen, "#models") == [
            [figures.LLAMA, "1,038,000", "1.0 GiB"],
            [f"{figures.QWEN} (not loaded)", "220,400", "220 MiB"],
        ]
        assert not is_visible(show({**both, "models": both["models"][:1]}), "#models")

    def test_hit_rates(self, show: Show) -> None:
        """The four rates, and of what they are."""
        tiles = [each.split("\n") for each in texts(show(figures.busy()), "#rates > div")]
        assert tiles[0] == ["Last minute", "93%", "7 requests", "19,968 of 21,504"]
        assert [tile[1] for tile in tiles] == ["93%", "88%", "85%", "83%"]

    def test_the_chart_has_a_bar_for_each_time_with_requests(self, show: Show) -> None:
        """Reused tokens at the bottom, computed ones above; the highest fills the height."""
        stats = figures.busy()
        nothing = {"requests": 0, "prompt_tokens": 0, "hit_tokens": 0}
        history = [{**nothing, "age_seconds": 895.0 - 10 * place} for place in range(90)]
        history[0] |= {"requests": 1, "prompt_tokens": 50}
        history[89] |= {"requests": 2, "prompt_tokens": 100, "hit_tokens": 75}
        seen = show({**stats, "history": history})
        path = "return document.querySelector(arguments[0]).getAttribute('d')"
        assert seen.run(path, "path.hit") == "M89.12 100V26.5h.76V100z"
        assert seen.run(path, "path.miss") == "M0.12 100V51h.76V100zM89.12 26.5V2h.76V26.5z"

    def test_the_chart_is_told_in_words(self, show: Show) -> None:
        """By its label, and minute by minute in a table that adds up to it."""
        stats = figures.busy()
        seen = show(stats)
        label = seen.run("return document.querySelector('#chart').getAttribute('aria-label')")
        total = sum(each["prompt_tokens"] for each in stats["history"])
        assert f"Prompt tokens of the last 15 minutes: {total:,}, of which" in label
        seen.run("document.querySelector('details').open = true")
        minutes = rows(seen, "#minutes")
        assert [row[0] for row in minutes][:2] == ["0 to 1", "1 to 2"]
        assert sum(int(row[1].replace(",", "")) for row in minutes) == total

    def test_reasons(self, show: Show) -> None:
        """The costliest first, each explained; what never happened is left out."""
        reasons = rows(show(figures.busy()), "#reasons")
        assert [row[1:] for row in reasons] == [
            ["164", "188,416"],
            ["41", "88,320"],
            ["9", "34,944"],
            ["122", "122"],
        ]
        assert reasons[0][0].split("\n") == [
            "diverged",
            "What is stored goes on in another way from some token on.",
        ]

    def test_every_reason_and_cause_is_explained(self, show: Show) -> None:
        """Also those that are rare."""
        stats = figures.busy()
        once = {"requests": 1, "misses": 1, "tokens": 1}
        stats["misses"] = dict.fromkeys(figures.REASONS, once)
        stats["evictions"] = dict.fromkeys(stats["evictions"], {"blocks": 1, "bytes": 1})
        seen = show(stats)
        for row in rows(seen, "#reasons") + rows(seen, "#evictions"):
            name, _, hint = row[0].partition("\n")
            assert name and hint.endswith("."), row

    def test_sizing(self, show: Show) -> None:
        """The sentence, and all scales in order, with what is not known."""
        seen = show(figures.busy())
        assert seen.text("#sizing") == "With 8 GiB instead of 4 GiB, 91% instead of 83%."
        assert rows(seen, "#scales") == [
            ["2.0 GiB", "71%"],
            ["4.0 GiB, as now", "83%"],
            ["8.0 GiB", "91%"],
            ["16 GiB", "not known"],
        ]

    def test_last_misses(self, show: Show) -> None:
        """When, why, and how many tokens; the rest of a long list on demand."""
        seen = show(figures.busy())
        visible = rows(seen, "#misses")
        assert visible[:2] == [
            ["3 s", "diverged at token 1,536", "2,774 of 4,310"],
            ["48 s", "nothing stored", "19,344 of 19,344"],
        ]
        assert len(visible) == 8
        unfold(seen)
        assert len(rows(seen, "#misses")) == 13

    def test_work(self, show: Show) -> None:
        """What was stored and given up, and how long a request takes on average."""
        seen = show(figures.busy())
        work = seen.text("#work")
        assert "334 prompts, 1,620,992 new tokens" in work
        assert re.search(r"Not stored: no room\s+2", work)
        assert "40 ms, 295 times" in work and "75 ms, 334 times" in work
        assert "draft model" not in work and "disk" not in work
        assert [row[1:] for row in rows(seen, "#evictions")] == [
            ["2,410", "326 MiB"],
            ["64", "9.0 MiB"],
        ]

    def test_disk(self, show: Show) -> None:
        """The disk tier has its own gauge and figures, if there is one."""
        seen = show(figures.with_disk())
        disk = seen.text("#disk")
        assert "7.0 GiB of 20 GiB, 35%" in disk
        assert "1,310 files, 9.0 GiB" in disk and "92,416 tokens" in disk
        assert figures.with_disk()["disk"]["folder"] in disk
        assert not is_visible(show(figures.busy()), "#disk")

    def test_trouble(self, show: Show) -> None:
        """Failures and a shortage are said on top, and only then."""
        seen = show({**figures.busy(), **figures.trouble()})
        assert is_visible(seen, "#short")
        assert seen.text("#failed").startswith("The cache failed 3 times (fetch: 2, insert: 1)")
        assert "CodecError: the record" in seen.text("#failed")
        seen = show(figures.busy())
        assert texts(seen, ".notice") == []

    def test_before_the_first_prompt(self, show: Show) -> None:
        """Says what to do, and that there is nothing where there is nothing."""
        seen = show(figures.empty())
        assert seen.text("#empty").startswith("Nothing is stored yet. Send the server")
        assert "No request in the last 15 minutes" in seen.text("#hits")
        assert texts(seen, ".none") == [
            "No request so far.",
            "No misses so far.",
            "Nothing so far.",
        ]
        assert seen.text("#sizing") == "Too little has been asked to tell."

    def test_while_the_cache_is_off(self, show: Show) -> None:
        """Says so, and shows neither figures nor a button."""
        seen = show(figures.disabled())
        assert "The prefix cache is off (--disable-prefix-cache)" in seen.text("#off")
        assert not is_visible(seen, "#grid") and not is_visible(seen, "#clear")

    def test_full_precision(self, show: Show) -> None:
        """A codec without bits has none."""
        settings = {**figures.busy()["settings"], "codec": "raw", "key_bits": None}
        seen = show({**figures.busy(), "settings": settings})
        assert "codec raw, full precision" in seen.text("#about")

    def test_tree(self, show: Show) -> None:
        """Sizes, age and words of what is stored, the first branches of each model unfolded."""
        seen = show(figures.busy())
        assert texts(seen, "h3") == [figures.LLAMA, f"{figures.QWEN} (not loaded)"]
        lines = [" ".join(each.split()) for each in texts(seen, "#tree .row")]
        assert lines[0] == f"system {figures.SYSTEM} 1,536 tokens · 120 MiB · 4 s ago"
        assert lines[1] == (
            "user How do I rename a branch that I have pushed already? ↵ I use Git 2.51. "
            "512 tokens to 2,048 · 40 MiB · 4 s ago"
        )
        assert lines[-1] == "user checkpoint · at token 2,048 · 3.0 MiB · 1 h ago"
        assert "Of 214 sequences, the 100 used last are shown." in seen.text("#shown")
        assert not any("push it under its new" in line for line in lines)
        seen.run("document.querySelectorAll('#tree summary')[1].click()")
        assert "Rename it here, then push it under its new" in seen.text("#tree")

    def test_without_words(self, show: Show) -> None:
        """Another machine is shown sizes, and told where the words and the button are."""
        seen = show(figures.without_text())
        assert "The words are shown on this machine alone." in seen.text("#shown")
        assert texts(seen, "#tree .words")[0] == "system"
        assert not is_visible(seen, "#clear")
        assert seen.text("#far") == "Can be cleared from this machine alone"

    def test_sizes_and_ages(self, show: Show) -> None:
        """Units of 1024, and the largest unit of time that fits."""
        seen = show(figures.busy())
        sizes = [0, 1, 1023, 1024, 10 * 1024, 1023 * 1024, 5 << 29, 3 << 40]
        assert seen.run("return arguments[0].map(size)", sizes) == [
            *("0 bytes", "1 byte", "1,023 bytes", "1.0 KiB", "10 KiB", "1.0 MiB"),
            *("2.5 GiB", "3.0 TiB"),
        ]
        ages = [-0.1, 3.9, 59.9, 60, 3599, 7300, 200_000]
        assert seen.run("return arguments[0].map(age)", ages) == [
            *("0 s", "3 s", "59 s", "1 min", "59 min", "2 h", "2 d"),
        ]
        assert seen.run("return [null, 0, 0.994, 0.9999, 1].map(percent)") == [
            *("–", "0%", "99%", "99%", "100%"),
        ]


class TestHostileText:
    """Prompts are written by strangers, and so are the names of models in requests."""

    def test_it_stays_text(self, show: Show) -> None:
        """Markup is shown as it was written, and does nothing."""
        seen = show(hostile())
        unfold(seen)
        assert MARKUP in seen.text("#tree") and MARKUP in seen.text("#tree h3")
        assert MARKUP in seen.text("#misses") and MARKUP in seen.text("#failed")
        assert seen.run("return [window.stolen ?? null, document.images.length]") == [None, 0]
        assert seen.run("return document.scripts.length") == 1

    def test_it_cannot_turn_a_line_around(self, show: Show) -> None:
        """Characters that change the direction of what follows are made visible."""
        seen = show(hostile())
        everything = seen.run("return document.body.textContent")
        assert not set(OVERRIDE) & set(everything) - set("gnihtyna ")
        assert "\ufffdgnihtyna \ufffd" in everything

    def test_it_cannot_take_the_room_of_others(self, show: Show) -> None:
        """Long words end after two lines."""
        seen = show(hostile())
        unfold(seen)
        lengths = seen.run(
            "return [...document.querySelectorAll('bdi')].map(e => e.innerText.length)"
        )
        heights = seen.run(
            "return [...document.querySelectorAll('.words')].map(each => each.offsetHeight)"
        )
        assert max(lengths) == 201 and max(heights) < 60


class TestEverybody:
    """No state of the page bars anybody, on any screen."""

    STATES = {
        "everything": lambda: {**figures.with_disk(), **figures.trouble()},
        "without_text": figures.without_text,
        "empty": figures.empty,
        "disabled": figures.disabled,
        "hostile": hostile,
    }

    @pytest.mark.parametrize("state", STATES)
    def test_axe_finds_nothing(self, show: Show, state: str) -> None:
        """Contrast, names, order of headings and the like, everything unfolded."""
        seen = show(self.STATES[state]())
        unfold(seen)
        assert violations(seen) == {}

    def test_axe_finds_nothing_in_the_dialog(self, show: Show) -> None:
        """The question before clearing."""
        seen = show(figures.with_disk())
        seen.run("document.querySelector('#clear').click()")
        assert violations(seen) == {}

    @pytest.mark.parametrize("state", STATES)
    def test_nothing_is_wider_than_a_narrow_screen(self, show: Show, state: str) -> None:
        """320 pixels are what a zoom of 400% leaves of a desktop."""
        seen = show(self.STATES[state](), NARROW, 700)
        unfold(seen)
        assert seen.run("return document.documentElement.scrollWidth") == NARROW
        seen.run("document.querySelector('#ask').showModal()")
        assert seen.run("return document.documentElement.scrollWidth") == NARROW

    def test_the_keyboard_reaches_everything(self, show: Show) -> None:
        """In the order of the page, and one sees where one is."""
        seen = show(figures.busy())
        operable = seen.run(
            "return [...document.querySelectorAll('a, button, summary')]"
            ".filter(each => each.checkVisibility()).map(each => each.innerText)"
        )
        reached = []
        for _ in operable:
            seen.press(TAB)
            here, outline = seen.run(
                "const here = document.activeElement;"
                "return [here.innerText, getComputedStyle(here).outlineStyle]"
            )
            reached.append(here)
            assert outline == "solid"
        assert reached == operable and len(reached) > 8

    def test_the_keyboard_unfolds(self, show: Show) -> None:
        """A branch, and the rest of a list."""
        seen = show(figures.busy())
        focus(seen, "#tree summary")
        seen.press(ENTER)
        assert "Task 1" not in seen.text("#tree")
        seen.press(SPACE)
        assert "Task 1" in seen.text("#tree")
        focus(seen, "section:has(#misses) .more")
        seen.press(ENTER)
        assert len(rows(seen, "#misses")) == 13
        assert seen.text("section:has(#misses) .more") == "Show the first 8 misses"


class TestPolling:
    """New figures come by themselves, and disturb nobody."""

    def test_it_asks_by_itself(self, show: Show, server: StatusServer) -> None:
        """Again and again."""
        seen = show(figures.busy())
        server.stats_answer = {**figures.busy(), "version": "0.2.0"}
        seen.shows("#about", "Version 0.2.0")

    def test_never_two_at_once(self, show: Show, server: StatusServer) -> None:
        """While an answer is on its way, nothing makes it ask again."""
        seen = show(figures.busy())
        server.may_answer.clear()
        for _ in range(5):
            poll(seen)
        wait_for(lambda: server.at_once)
        poll(seen)
        server.stats_answer = {**figures.busy(), "version": "0.2.0"}
        server.may_answer.set()
        seen.shows("#about", "Version 0.2.0")
        assert server.most_at_once == 1

    def test_out_of_view_it_asks_nothing(self, show: Show, server: StatusServer) -> None:
        """A tab in the background costs the server nothing, and is up to date once it is seen."""
        seen = show(figures.busy())
        driver = seen.driver
        tab = driver.current_window_handle
        driver.switch_to.new_window("tab")
        time.sleep(0.3)  # for a request that was under way
        before = len(server.asked)
        time.sleep(2.2)
        assert len(server.asked) == before
        driver.close()
        driver.switch_to.window(tab)
        server.stats_answer = {**figures.busy(), "version": "0.2.0"}
        seen.shows("#about", "Version 0.2.0")

    def test_what_is_unfolded_and_focused_stays(self, show: Show, server: StatusServer) -> None:
        """Also where the order changes, since the newest comes first."""
        branching = [node(f"chat {n}", 128, node("a", 64), node("b", 32)) for n in range(4)]
        stats = {**figures.busy(), "sequences": figures.tree(node("System", 512, *branching))}
        seen = show(stats)
        focus(seen, f"{CHATS}:nth-child(3) summary")
        seen.press(ENTER)
        seen.run("window.kept = document.activeElement")
        assert "chat 2" in seen.run("return window.kept.innerText")
        others = [branching[2], node("chat 4", 128), branching[3], branching[0], branching[1]]
        moved = {**stats, "sequences": figures.tree(node("System", 512, *others))}
        show_next(seen, server, moved)
        names = [re.findall(r"chat \d", each) for each in texts(seen, CHATS)]
        assert names == [["chat 2"], ["chat 4"], ["chat 3"], ["chat 0"], ["chat 1"]]
        assert seen.run("return document.activeElement === window.kept && window.kept.isConnected")
        unfolded = "return [...document.querySelectorAll(arguments[0])].map(each => each.open)"
        assert seen.run(unfolded, f"{CHATS} > details") == [True, False, False, False]

    def test_what_is_selected_stays(self, show: Show, server: StatusServer) -> None:
        """Whoever copies some words can do so in peace."""
        seen = show(figures.busy())
        selected = seen.run(
            "const range = document.createRange();"
            "range.selectNodeContents(document.querySelectorAll('bdi')[1]);"
            "getSelection().removeAllRanges(); getSelection().addRange(range);"
            "return getSelection().toString()"
        )
        older = figures.busy()
        for each in older["sequences"]["roots"][0]["nodes"]:
            each["age_seconds"] += 2
        older["last_misses"].insert(0, figures.miss(0.5, 400, 3, "diverged", "diverged at token 3"))
        show_next(seen, server, older)
        assert seen.run("return getSelection().toString()") == selected != ""
        assert rows(seen, "#misses")[0][1] == "diverged at token 3"

    def test_what_is_gone_goes(self, show: Show, server: StatusServer) -> None:
        """Nothing of the last figures is left behind."""
        seen = show(figures.busy())
        show_next(seen, server, figures.empty())
        assert texts(seen, "#tree li") == [] and rows(seen, "#misses") == []
        assert seen.text("#bare") == "Nothing is stored now."

    def test_a_screen_reader_is_left_alone(self, show: Show, server: StatusServer) -> None:
        """What is announced does not change with the figures."""
        seen = show(figures.busy())
        count_announcements(seen)
        show_next(seen, server, figures.with_disk())
        show_next(seen, server, figures.busy())
        assert seen.run("return window.announced") == 0

    def test_when_the_server_is_gone(self, browser: Browser) -> None:
        """The last figures stay; it says so once, asks on, and says when it is back."""
        server = StatusServer(figures.busy())
        with server.listening():
            browser.looks(*LOOKS[0])
            browser.open(server.origin + "/cache")
            browser.shows("#about", "Version")
            count_announcements(browser)
        for _ in range(2):
            poll(browser)
            wait_for(browser.complaints)
        browser.shows("#lost", "No answer from the server since ")
        assert browser.text("#live") == "Not live"
        assert "1.2 GiB" in browser.text("#grid")
        assert browser.run("return window.announced") == 1
        with server.listening():
            poll(browser)
            browser.shows("#lost", "The server answers again.")
            assert browser.text("#live") == "Live"
            poll(browser)
            browser.until("return document.querySelector('#lost').textContent === ''")
            browser.leave()

    def test_when_the_server_answers_something_else(self, show: Show, server: StatusServer) -> None:
        """An error is told as such."""
        seen = show(figures.busy())
        server.fails = True
        poll(seen)
        seen.shows("#lost", "HTTP 500")
        server.fails = False
        assert all("500" in each for each in wait_for(seen.complaints))


class TestClearing:
    """The one thing that the page can do."""

    @pytest.mark.parametrize(
        ("stats", "button", "target", "told"),
        [
            (figures.busy, "#everything", "/v1/cache", "1.0 GiB and 1,310 files."),
            (figures.with_disk, "#everything", "/v1/cache", "1.0 GiB and 1,310 files."),
            (figures.with_disk, "#memory-alone", "/v1/cache?tier=memory", "1.0 GiB."),
        ],
    )
    def test_by_keyboard(
        self,
        show: Show,
        server: StatusServer,
        stats: Callable[[], Stats],
        button: str,
        target: str,
        told: str,
    ) -> None:
        """It asks first, then does what was chosen, and tells what that was."""
        seen = show(stats())
        focus(seen, "#clear")
        seen.press(ENTER)
        assert seen.run("return document.activeElement.id") == "keep"
        while seen.run("return '#' + document.activeElement.id") != button:
            seen.press(TAB)
        assert deletions(server) == []
        seen.press(ENTER)
        seen.shows("#done", "Cleared at")
        assert seen.text("#done").endswith(f": {told}")
        assert deletions(server) == [target]
        assert seen.run("return document.activeElement.id") == "clear"

    def test_without_a_disk_there_is_nothing_to_choose(self, show: Show) -> None:
        """One button that does it, and one that does not."""
        seen = show(figures.busy())
        seen.run("document.querySelector('#clear').click()")
        assert texts(seen, "#ask button") == ["Cancel", "Clear"]

    @pytest.mark.parametrize("key", [ENTER, ESCAPE], ids=["cancel", "escape"])
    def test_no_is_no(self, show: Show, server: StatusServer, key: str) -> None:
        """The key that was pressed by mistake does no harm."""
        seen = show(figures.busy())
        focus(seen, "#clear")
        seen.press(ENTER, key)
        seen.until("return !document.querySelector('#ask').open")
        assert seen.run("return document.activeElement.id") == "clear"
        show_next(seen, server, figures.busy())
        assert deletions(server) == []

    def test_a_refusal_is_told(self, show: Show, server: StatusServer) -> None:
        """With the reason that the server gives."""
        seen = show(figures.busy())
        server.refuses = "the disk is busy"
        seen.run("document.querySelector('#everything').click()")
        seen.shows("#done", "Not cleared: the disk is busy")
        assert all("503" in each for each in wait_for(seen.complaints))


def violations(browser: Browser) -> dict[tuple[int, int, str], list[str]]:
    """What axe-core has against the page, by look."""
    found = {}
    for look in LOOKS:
        browser.looks(*look)
        # Contrast takes most of the time, and is the same in the next look but one.
        found[look] = browser.violations(with_contrast=look in LOOKS[:2])
    return {look: each for look, each in found.items() if each}


def rows(browser: Browser, body: str) -> list[list[str]]:
    """The texts of the visible cells of a table."""
    return browser.run(
        "return [...document.querySelector(arguments[0]).rows].filter(row => row.checkVisibility())"
        ".map(row => [...row.cells].map(cell => cell.innerText.trim()))",
        body,
    )


def texts(browser: Browser, selector: str) -> list[str]:
    """The texts of all visible elements that have one."""
    return browser.run(
        "return [...document.querySelectorAll(arguments[0])]"
        ".filter(each => each.checkVisibility() && each.innerText).map(each => each.innerText)",
        selector,
    )


def is_visible(browser: Browser, selector: str) -> bool:
    return browser.run("return document.querySelector(arguments[0]).checkVisibility()", selector)


def focus(browser: Browser, selector: str) -> None:
    browser.run("document.querySelector(arguments[0]).focus()", selector)


def count_announcements(browser: Browser) -> None:
    """From now on, count how often something changes that a screen reader reads out."""
    browser.run(
        "window.announced = 0;"
        "const observer = new MutationObserver(() => window.announced++);"
        "for (const each of document.querySelectorAll('[role=status], [role=alert], [aria-live]'))"
        "  observer.observe(each, {subtree: true, childList: true, characterData: true});"
    )


def deletions(server: StatusServer) -> list[str]:
    return [each.target for each in server.asked if each.method == "DELETE"]


def wait_for(condition: Callable[[], Any]) -> Any:
    """What a condition comes to, once that is something."""
    end = time.monotonic() + WAIT_SECONDS
    while not (outcome := condition()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return outcome
