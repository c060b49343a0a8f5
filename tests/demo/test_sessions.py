"""How prompts grow, turn by turn."""

from __future__ import annotations

from typing import Any

import pytest

from demo import prompts, sessions
from demo.client import Reply


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was asked of the servers, chats and texts; nothing is sent."""
    asked: list[Any] = []

    def ask(server: object, prompt: Any, *, max_tokens: int) -> Reply:
        asked.append(prompt if isinstance(prompt, str) else [*prompt])
        return Reply(" and so on", 0, 0, 0.0, 0.0, 0)

    monkeypatch.setattr(sessions, "chat", ask)
    monkeypatch.setattr(sessions, "complete", ask)
    return asked


def hold(session: sessions.Session) -> None:
    for line in session.lines:
        session.say(line)
        session.keep(session.ask(None, max_tokens=8).text)  # type: ignore[arg-type]


def test_chats_share_the_system_prompt(asked: list[Any]) -> None:
    first, second = sessions.two_chats("Be kind.", turns=2)
    hold(first)
    hold(second)
    assert [len(messages) for messages in asked] == [2, 4, 2]
    assert asked[1][:2] == asked[0]
    assert asked[1][2] == {"role": "assistant", "content": " and so on"}
    assert asked[2][0] == asked[0][0] == {"role": "system", "content": "Be kind."}
    assert asked[2][1] != asked[0][1]


def test_a_draft_takes_the_answers_and_the_other_goes_back_to_the_first_prompt(
    asked: list[Any],
) -> None:
    """Each prompt continues an earlier one: sliding windows cannot be taken back any further."""
    first, second = sessions.two_drafts("Be kind.", turns=3)
    hold(first)
    hold(second)
    assert asked[0] == f"Be kind.{prompts.FIRST_DRAFT[0]}"
    assert asked[1] == f"{asked[0]} and so on{prompts.FIRST_DRAFT[1]}"
    assert asked[2] == f"{asked[1]} and so on{prompts.FIRST_DRAFT[2]}"
    assert asked[3] == f"{asked[0]}{prompts.SECOND_DRAFT}"
    assert not asked[3].startswith(f"{asked[0]} and so on")


def test_every_number_of_turns_has_its_lines() -> None:
    """The demo lets choose as many as the first chat has."""
    turns = len(prompts.FIRST_CHAT)
    for two in (sessions.two_chats, sessions.two_drafts):
        assert [len(session.lines) for session in two("", turns)] == [turns, 1]
