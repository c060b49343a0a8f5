"""The status page of a real server in a real browser: what axe-core has against it.

SmolLM2 answers a few chats at 4 bits in so little memory that some of it is given up. Then the page
is opened in a headless Chromium (Debian's chromium and chromium-driver; selenium and
axe-playwright-python from PyPI), wide and narrow, light and dark. A full run saves what it looks
like to docs/page-*.png.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from itertools import islice
from pathlib import Path

from demo.client import Message, chat
from demo.prompts import MANNERS, OPENING
from demo.server import HOST, Server, find_openblas, free_ports
from tests.web.browser import NEEDED, Browser, opened

from .report import Report, Row
from .restart import model

FLAGS = ("--kv-cache-bits", "4", "--cache-memory-mb", "6")

TUTORS = {
    "Emil, who is nine": ("How many planets are there?", "Which one is the largest?"),
    "Ada, who is twelve": ("What do bees eat?", "Why do they dance?", "Do they sleep in winter?"),
    "Noor, who is ten": ("What is half of ten?", "And half of that?"),
    "Kofi, who is eleven": ("Who invented paper?", "When was that?"),
}
"""What each child asks; the system prompt ends with who it is."""

PHONE = 390
LOOKS = [(w, h, scheme) for w, h in ((1180, 1400), (PHONE, 844)) for scheme in ("light", "dark")]
DOCS = Path(__file__).parents[1] / "docs"


def measure(arguments: argparse.Namespace) -> Report:
    """Count what is wrong with the page in each of its looks."""
    os.environ[NEEDED] = "1"  # or a missing browser would skip a test that there is not
    os.environ.pop("LD_PRELOAD", None)  # the server gets its own; a browser crashes with it
    with tempfile.TemporaryDirectory() as folder:
        (port,) = free_ports(1)
        log = Path(folder, "server.log")
        with Server(model(), FLAGS, port=port, log=log, preload=find_openblas()) as server:
            server.wait_until_healthy()
            answer_chats(server)
            with opened() as browser:
                found = look(browser, port, DOCS if not arguments.quick else Path(folder))
    note = "; ".join(sorted({violation[:80] for each in found for violation in each}))
    looks = f"{len(LOOKS)} looks"
    return Report([Row("axe-core's violations", sum(map(len, found)), 0, note or looks)])


def answer_chats(server: Server) -> None:
    """All chats begin alike; the first two come back, when some of them was given up."""
    for child in (*TUTORS, *islice(TUTORS, 2)):
        system = " ".join((OPENING, *MANNERS[:18], f"You talk to {child}."))
        messages: list[Message] = [{"role": "system", "content": system}]
        for question in TUTORS[child]:
            messages.append({"role": "user", "content": question})
            reply = chat(server, messages, max_tokens=32)
            messages.append({"role": "assistant", "content": reply.text})
            time.sleep(3)  # as a child would


def look(browser: Browser, port: int, folder: Path) -> list[list[str]]:
    """What axe-core says of each look; a picture of each goes into the folder."""
    found: list[list[str]] = []
    for width, height, scheme in LOOKS:
        browser.looks(width, height, scheme)
        browser.open(f"http://{HOST}:{port}/cache")
        browser.shows("#about", "Version")
        found.append(browser.violations())
        name = f"page-{scheme}.png" if width > PHONE else f"page-phone-{scheme}.png"
        browser.driver.save_screenshot(str(folder / name))
    return found
