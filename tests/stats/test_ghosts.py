"""The lists that tell what stores of other sizes would hold, against lists that are plainly so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from mlx_lm_kvcache_plugin.stats import ghosts as module
from mlx_lm_kvcache_plugin.stats.ghosts import Ghosts, checkpoint_chain
from mlx_lm_kvcache_plugin.store.blocks import CHECKPOINT, Block, Root, chain_of
from tests.store.trees import Load, ids

STEP = 2

SCALES = (0.5, 2.0, 4.0)

ROOTS = ("one", "other")


def keys(letters: str) -> list[bytes]:
    """The tokens of a sequence's blocks, the last of which need not be whole."""
    return [ids(letters[at : at + STEP]).tobytes() for at in range(0, len(letters), STEP)]


def chains(letters: str, root: str = "one") -> list[int]:
    """The chains of a sequence's blocks."""
    found, chain = [], hash(root)
    for key in keys(letters):
        chain = chain_of(chain, key)
        found.append(chain)
    return found


class Use(NamedTuple):
    """A sequence that is used, and what the store is like then."""

    root: str
    letters: str
    weight_bytes: float
    limit_bytes: int


class LeastRecentlyUsed:
    """A store of some size, slow and plain.

    Attributes:
        held: roots and chains, the least recently used first.
    """

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.held: list[tuple[str, int]] = []
        self.weights: dict[str, float] = {}

    def use(self, use: Use) -> None:
        self.weights[use.root] = use.weight_bytes
        for chain in reversed(chains(use.letters, use.root)):
            self.held = [pair for pair in self.held if pair[1] != chain] + [(use.root, chain)]
        while sum(self.weights[root] for root, _ in self.held) > self.scale * use.limit_bytes:
            del self.held[0]


def use_all(uses: Sequence[Use]) -> Ghosts:
    ghosts = Ghosts(SCALES, STEP)
    for use in uses:
        path = chains(use.letters, use.root)
        ghosts.use(hash(use.root), path, use.weight_bytes, use.limit_bytes)
    return ghosts


sequences = st.text("ab", min_size=2, max_size=12).map(lambda text: text[: len(text) // 2 * 2])

uses = st.lists(
    st.builds(
        Use,
        st.sampled_from(ROOTS),
        sequences,
        st.sampled_from([1.0, 1.5, 2.0]),
        st.sampled_from([2, 4, 5, 8]),
    ),
    max_size=20,
)


@given(uses)
def test_a_list_holds_what_a_store_of_that_size_would(uses: list[Use]) -> None:
    """Exactly: for every scale, of two models, as weights and the budget change."""
    ghosts = use_all(uses)
    for scale in SCALES:
        store = LeastRecentlyUsed(scale)
        for use in uses:
            store.use(use)
        assert len(ghosts.lists[scale]) == len(store.held)
        assert all(chain in ghosts.lists[scale] for _, chain in store.held)
        assert not ghosts.lists[scale].is_cut


@given(uses, sequences, st.sampled_from(ROOTS))
def test_a_prompt_is_held_up_to_its_first_block_that_is_not(
    uses: list[Use], letters: str, root: str
) -> None:
    """By every list as far as a walk along it goes, and by a larger one no less far."""
    ghosts = use_all(uses)
    held = ghosts.held_blocks(hash(root), keys(letters))
    for scale in SCALES:
        walk = [chain in ghosts.lists[scale] for chain in chains(letters, root)]
        assert held[scale] == STEP * [*walk, False].index(False)
    assert held[0.5] <= held[2.0] <= held[4.0]


def checkpoint(letters: str) -> tuple[int, int, int]:
    """Its chain, that of the whole block before it, and how many tokens it stands behind that."""
    node: Block = Root("one")
    block = node
    for key in keys(letters):
        node = Block(node, key, Load(1), "")
        block = node if node.tokens == STEP else block
    tail = node.tokens if node is not block else 0
    return Block(node, CHECKPOINT, Load(1), "").chain, block.chain, tail


@given(
    st.lists(st.text("ab", min_size=1, max_size=7), max_size=12),
    st.text("ab", min_size=1, max_size=9),
    st.integers(0, 9),
)
def test_a_prompt_is_held_up_to_its_deepest_checkpoint(
    stored: list[str], letters: str, most: int
) -> None:
    """Of those at which it may resume, short of its end, and that a list still has."""
    most = min(most, len(letters) - 1)
    ghosts = Ghosts(SCALES, STEP)
    for each in stored:
        chain, block, tail = checkpoint(each)
        ghosts.note_checkpoint(block, tail)
        ghosts.use(hash("one"), [chain], 1.0, limit_bytes=2)
    held = ghosts.held_checkpoints(hash("one"), keys(letters), most)
    for scale in SCALES:
        expected = [
            len(each)
            for each in stored
            if letters.startswith(each)
            and len(each) <= most
            and checkpoint(each)[0] in ghosts.lists[scale]
        ]
        assert held[scale] == max(expected, default=0)


@pytest.mark.parametrize("letters", ["a", "ab", "abc", "abcd"])
def test_a_checkpoint_has_the_chain_that_the_tree_gives_it(letters: str) -> None:
    """Behind a block, behind a tail, and behind a tail that nothing is before."""
    chain, block, tail = checkpoint(letters)
    assert checkpoint_chain(block, ids(letters[len(letters) - tail :]).tobytes()) == chain


def small_lists(monkeypatch: pytest.MonkeyPatch, least: int, most: int) -> None:
    """Let lists have few chains."""
    monkeypatch.setattr(module, "LEAST_KEYS", least)
    monkeypatch.setattr(module, "MOST_KEYS", most)


@pytest.mark.parametrize(
    ("limit_bytes", "most"), [(0, 4), (5 << 16, 5), (7 << 16, 7), (100 << 16, 8)]
)
def test_the_number_of_chains_is_bounded(
    monkeypatch: pytest.MonkeyPatch, limit_bytes: int, most: int
) -> None:
    """By the budget within bounds; a list that had to give up what it had room for says so."""
    small_lists(monkeypatch, 4, 8)
    ghosts = Ghosts(SCALES, STEP)
    weight = limit_bytes / 6
    for number in range(30):
        ghosts.use(1, [number], weight, limit_bytes)
    room = {scale: 30 if not weight else int(6.001 * scale) for scale in SCALES}
    assert {scale: len(held) for scale, held in ghosts.lists.items()} == {
        scale: min(most, room[scale]) for scale in SCALES
    }
    assert {scale: held.is_cut for scale, held in ghosts.lists.items()} == {
        scale: room[scale] > most for scale in SCALES
    }


def test_the_number_of_places_of_checkpoints_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were noted last are known."""
    small_lists(monkeypatch, 3, 8)
    ghosts = Ghosts(SCALES, STEP)
    for letters in ("ab", "cd", "ef", "ab", "gh"):
        chain, block, tail = checkpoint(letters)
        ghosts.note_checkpoint(block, tail)
        ghosts.use(hash("one"), [chain], 1.0, limit_bytes=100)
    held = {
        letters: ghosts.held_checkpoints(hash("one"), keys(letters + "zz"), 4)[4.0]
        for letters in ("ab", "cd", "ef", "gh")
    }
    assert held == {"ab": 2, "cd": 0, "ef": 2, "gh": 2}


def test_what_is_forgotten_has_no_weight() -> None:
    """One chain or all: there is room for others in its place."""
    ghosts = use_all([Use("one", "abcdef", 1.0, 1)])
    ghosts.forget([*chains("ab"), 12345])
    assert [len(held) for held in ghosts.lists.values()] == [0, 1, 3 - 1]
    ghosts.use(hash("one"), chains("gh"), 1.0, 1)
    assert ghosts.held_blocks(hash("one"), keys("gh")) == {0.5: 0, 2.0: 2, 4.0: 2}
    assert all(chains("cd", "one")[0] not in held for held in ghosts.lists.values())
    ghosts.clear()
    assert [len(held) for held in ghosts.lists.values()] == [0, 0, 0]
    ghosts.use(hash("one"), chains("abcd"), 1.0, 1)
    assert ghosts.held_blocks(hash("one"), keys("abcd")) == {0.5: 0, 2.0: 4, 4.0: 4}


def test_keys_are_as_long_as_tokens_are() -> None:
    """The helper above makes the keys that a tree has."""
    assert keys("abc") == [np.array([97, 98]).tobytes(), np.array([99]).tobytes()]
