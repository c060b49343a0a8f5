"""Conversations with a model that needs checkpoints, as far as the tree sees them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from mlx_lm_kvcache_plugin.store.blocks import Block
from mlx_lm_kvcache_plugin.store.thinning import GENERATED, PROMPT, SYSTEM, USER, thin
from mlx_lm_kvcache_plugin.store.tree import BlockTree
from tests.store.trees import MODEL, ids, make_tree, put_checkpoint

Ids = list[int]


class Checkpoints:
    """A tree that is told of prompts and answers, and gives up what they make needless.

    Args:
        block_tokens: of its blocks.
    """

    def __init__(self, block_tokens: int = 8) -> None:
        self.tree: BlockTree = make_tree(block_tokens)
        self._fresh = itertools.count(1)

    def fresh(self, count: int) -> Ids:
        """Tokens that were in no sequence before."""
        return list(itertools.islice(self._fresh, count))

    def set(self, tokens: Ids, label: str) -> None:
        """Set a checkpoint at the end of these tokens, as the composer does."""
        node, position = self.tree.find_checkpoint(MODEL, ids(tokens))
        if node is not None and position == len(tokens):
            self.tree.touch(node)
            return
        insertion = put_checkpoint(self.tree, tokens, label=label, nbytes=100, row_bytes=10)
        thin(self.tree, MODEL, ids(tokens), insertion.tip)
        self.tree.check()

    def hit(self, tokens: Ids) -> int:
        """For how many of the tokens the deepest checkpoint on their way stands."""
        return self.tree.find_checkpoint(MODEL, ids(tokens))[1]

    def nodes(self) -> list[Block]:
        """All checkpoints, the oldest first."""
        return [node for node in self.tree if not node.tokens]

    def __len__(self) -> int:
        return len(self.nodes())


@dataclass
class Chat:
    """One conversation.

    Attributes:
        system: its system prompt, perhaps shared with others.
        thought: how many tokens of each answer are thinking, which the next prompt leaves out.
        every: how often a long prompt has a checkpoint on its way; 0 for never.
        prompt, generated: the last prompt, and the same with what was generated behind it.
        prompts: all of them so far.
    """

    checkpoints: Checkpoints
    system: Ids = field(default_factory=list)
    thought: int = 0
    every: int = 0
    prompt: Ids = field(default_factory=list)
    generated: Ids = field(default_factory=list)
    prompts: list[Ids] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.system:
            self.checkpoints.set(self.system, SYSTEM)
            self.generated = self.prompt = self.system

    def ask(self, count: int = 6) -> None:
        """The user says something: the prompt grows by the answer, without thinking, and that."""
        start = len(self.prompt)
        answer = self.generated[start + self.thought :]
        self.prompt = self.prompt + answer + self.checkpoints.fresh(count)
        self.prompts.append(self.prompt)
        for position in range(self.every, len(self.prompt), self.every) if self.every else ():
            if position > start:
                self.checkpoints.set(self.prompt[:position], PROMPT)
        self.checkpoints.set(self.prompt, USER)
        self.generated = self.prompt

    def answer(self, count: int = 6) -> None:
        """The model answers the last prompt, perhaps once more, in other words."""
        self.generated = self.prompt + self.checkpoints.fresh(self.thought + count)
        self.checkpoints.set(self.generated, GENERATED)

    def turn(self, user: int = 6, answer: int = 6) -> None:
        """One question and its answer."""
        self.ask(user)
        self.answer(answer)

    def edit(self, turns: int) -> None:
        """Go back so many turns: another answer to an earlier prompt is to follow."""
        self.prompt = self.generated = self.prompts[-1 - turns]
