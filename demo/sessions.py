"""What a user does at a server: hold a chat, or write a text that the model continues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from . import prompts
from .client import Message, Reply, chat, complete
from .server import Server


class Session(Protocol):
    """A prompt that grows by a line of the user's and an answer in each turn."""

    @property
    def name(self) -> str: ...

    @property
    def lines(self) -> Sequence[str]:
        """What the user says, turn by turn."""

    def say(self, line: str) -> None:
        """Append what the user says."""

    def ask(self, server: Server, max_tokens: int) -> Reply:
        """Send the prompt to a server."""

    def keep(self, answer: str) -> None:
        """Append an answer."""


@dataclass
class Chat:
    """A chat, for models that have a template for it."""

    name: str
    system: str
    lines: Sequence[str]
    messages: list[Message] = field(init=False)

    def __post_init__(self) -> None:
        self.messages = [{"role": "system", "content": self.system}]

    def say(self, line: str) -> None:
        self.messages.append({"role": "user", "content": line})

    def ask(self, server: Server, max_tokens: int) -> Reply:
        return chat(server, self.messages, max_tokens=max_tokens)

    def keep(self, answer: str) -> None:
        self.messages.append({"role": "assistant", "content": answer})


@dataclass
class Draft:
    """A text that a model goes on with and the user goes on with again, for base models."""

    name: str
    text: str
    lines: Sequence[str]

    def say(self, line: str) -> None:
        self.text += line

    def ask(self, server: Server, max_tokens: int) -> Reply:
        return complete(server, self.text, max_tokens=max_tokens)

    def keep(self, answer: str) -> None:
        self.text += answer


def two_chats(system: str, turns: int) -> tuple[Session, ...]:
    """Two chats with the same system prompt.

    Args:
        system: the prompt.
        turns: of the first chat; the second has one.
    """
    return (
        Chat("chat 1", system, prompts.FIRST_CHAT[:turns]),
        Chat("chat 2", system, (prompts.SECOND_CHAT,)),
    )


def two_drafts(text: str, turns: int) -> tuple[Session, ...]:
    """One text continued in two ways.

    The first draft takes what the model offers and writes on. The second goes back to the first
    prompt and writes something else there: it shares that prompt and nothing after it, which is how
    far a model with sliding windows can be taken back.

    Args:
        text: the text so far.
        turns: of the first draft; the second has one.
    """
    return (
        Draft("draft 1", text, prompts.FIRST_DRAFT[:turns]),
        Draft("draft 2", text, (prompts.FIRST_DRAFT[0] + prompts.SECOND_DRAFT,)),
    )
