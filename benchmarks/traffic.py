"""Requests as agents make them, the same each time, and the memory of the server they reach."""

from __future__ import annotations

import pydoc_data.topics
import random
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psutil

from demo.client import Message
from demo.server import Server

OPEN_CHATS, LEFT_CHATS = 8, 16
MOST_MESSAGES = 12
NEW_CHAT, OLD_CHAT = 0.15, 0.1
"""How likely a request is the first of a new chat, or goes on with one that was left."""

SHARED_SYSTEMS, SHARED = 3, 0.7
"""How many system prompts are shared, and how likely a chat has one of them."""

SYSTEM_TOKENS, ANSWER_TOKENS, MESSAGE_TOKENS = (150, 300), (10, 60), (20, 120)
"""Between what lengths lie."""

WORDS = sorted(word for word in pydoc_data.topics.topics["compound"].split() if word.isalpha())

SAMPLE_S = 0.5


class Agents:
    """Agents whose chats go on by turns; for a tokenizer to which a byte is a token.

    A few chats are open at a time. Each request goes on with one of them, by what its agent has
    said and by a tool's result or a user's line; or it begins a new one, or comes back to one that
    was left long ago, in place of an open one. A chat has no more than `MOST_MESSAGES`, so that
    traffic is the same all the time. What agents say is drawn and not the model's: two servers get
    the same requests, whatever they answer.

    Args:
        seed: of everything that is drawn.
        longest: whether every message is as long as any gets.
    """

    def __init__(self, seed: int = 0, *, longest: bool = False) -> None:
        self._random = random.Random(seed)
        self._longest = longest
        self._systems = [self._text(SYSTEM_TOKENS) for _ in range(SHARED_SYSTEMS)]
        self._open = [self._new_chat() for _ in range(OPEN_CHATS)]
        self._left: deque[list[Message]] = deque(maxlen=LEFT_CHATS)

    def request(self) -> list[Message]:
        """The messages of the next request."""
        place, drawn = self._random.randrange(OPEN_CHATS), self._random.random()
        if len(self._open[place]) > MOST_MESSAGES:
            self._open[place] = self._new_chat()
        elif drawn < NEW_CHAT:
            self._left.append(self._open[place])
            self._open[place] = self._new_chat()
        elif drawn < NEW_CHAT + OLD_CHAT and self._left:
            old = self._random.randrange(len(self._left))
            self._open[place], self._left[old] = self._left[old], self._open[place]
        messages = self._open[place]
        self._open[place] = [*messages, *self._turn()]
        return messages

    def _new_chat(self) -> list[Message]:
        is_shared = self._random.random() < SHARED
        system = self._random.choice(self._systems) if is_shared else self._text(SYSTEM_TOKENS)
        first = {"role": "user", "content": self._text(MESSAGE_TOKENS)}
        return [{"role": "system", "content": system}, first]

    def _turn(self) -> list[Message]:
        role = self._random.choice(("tool", "user"))
        return [
            {"role": "assistant", "content": self._text(ANSWER_TOKENS)},
            {"role": role, "content": self._text(MESSAGE_TOKENS)},
        ]

    def _text(self, tokens: tuple[int, int]) -> str:
        """A text of words, that no other begins like."""
        length = tokens[1] if self._longest else self._random.randint(*tokens)
        text = ""
        while len(text) < length:
            text += " " + self._random.choice(WORDS)
        return text[1 : 1 + length]


Samples = dict[str, list[tuple[float, int]]]
"""For each server, by its name: seconds since the beginning, and bytes."""


@contextmanager
def resident_memory(servers: Mapping[str, Server]) -> Iterator[Samples]:
    """The resident memory of servers while the `with` block runs, sampled twice a second."""
    processes = {name: psutil.Process(server.pid) for name, server in servers.items()}
    samples: Samples = {name: [] for name in servers}
    begun, ended = time.monotonic(), threading.Event()

    def watch() -> None:
        while not ended.wait(SAMPLE_S):
            for name, process in processes.items():
                seconds = time.monotonic() - begun
                samples[name].append((seconds, process.memory_info().rss))

    with ThreadPoolExecutor(1) as thread:
        watching = thread.submit(watch)
        try:
            yield samples
        finally:
            ended.set()
    watching.result()
