"""Which checkpoints of a conversation are given up, and which stay."""

from __future__ import annotations

import math
from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from mlx_lm_kvcache_plugin.store.blocks import Block
from mlx_lm_kvcache_plugin.store.thinning import GENERATED, PROMPT, SYSTEM, USER, kept_of, thin
from mlx_lm_kvcache_plugin.store.tree import BlockTree
from tests.store.chats import Chat, Checkpoints
from tests.store.trees import MODEL, ids, letters_of, make_tree, put_checkpoint

# Which of a row of checkpoints


def kept(placed: Sequence[tuple[str, int]], end: int, step: int = 10) -> list[int]:
    """The positions that are kept of checkpoints with these labels."""
    older = [(Block(None, b"", None, label), position) for label, position in placed]
    older.sort(key=lambda pair: -pair[1])
    chosen = kept_of(older, end, step)
    return [position for node, position in older if node in chosen]


def test_the_steps_between_them_grow() -> None:
    """From one to the next one back it is at most three times as far from the end, and a block."""
    everywhere = [(GENERATED, position) for position in range(1000)]
    assert kept(everywhere, end=1000) == [990, 960, 870, 600]
    every_25 = [(GENERATED, position) for position in range(5, 1000, 25)]
    assert kept(every_25, end=1000) == [980, 930, 780, 330]


def test_where_there_were_none_the_next_ones_are_kept() -> None:
    """A turn may be longer than any step: where it begins one stays, whatever its label."""
    assert kept([(USER, 490), (USER, 500), (GENERATED, 510), (USER, 900)], end=1000) == [900, 510]
    assert kept([(GENERATED, 100), (GENERATED, 960)], end=1000) == [960, 100]


def test_the_beginning_counts_as_one() -> None:
    """What has hardly anything before it is not worth a checkpoint."""
    assert kept([(GENERATED, 3), (GENERATED, 7)], end=10) == []
    assert kept([(GENERATED, 3), (GENERATED, 7)], end=11) == [3]


def test_prompts_are_preferred_to_what_was_generated() -> None:
    """A user's turn to any other part of a prompt, and that to an answer, where one will do."""
    last = [(USER, 994), (PROMPT, 995)]
    for labels, chosen in [
        ((USER, PROMPT, GENERATED), 969),
        ((PROMPT, USER, GENERATED), 972),
        ((GENERATED, GENERATED, USER), 975),
        ((GENERATED, PROMPT, GENERATED), 972),
    ]:
        near = list(zip(labels, (969, 972, 975), strict=True))
        assert kept([(USER, 940), *near, *last], end=1000, step=14) == [995, 994, chosen, 940]


def test_the_last_prompt_and_the_last_user_turn_are_kept() -> None:
    """However near to one another, or to the end."""
    last = [(USER, 150), (USER, 151), (PROMPT, 152), (GENERATED, 153)]
    assert kept(last, end=155) == [152, 151, 150]
    assert kept([(USER, 2), (USER, 3), (PROMPT, 4), (GENERATED, 5)], end=10) == [4, 3]
    assert kept([(PROMPT, 2), (PROMPT, 3), (USER, 4)], end=10) == [4]


def test_all_system_prompts_are_kept() -> None:
    """Other conversations begin there."""
    assert kept([(SYSTEM, 2), (SYSTEM, 3), (USER, 4)], end=10) == [4, 3, 2]


@pytest.mark.parametrize("label", ["", "another plugin's"])
def test_other_labels_have_the_last_rank(label: str) -> None:
    """They are kept where there is nothing better."""
    assert kept([(USER, 980), (label, 993), (GENERATED, 995)], end=1000) == [995, 980]
    assert kept([(USER, 980), (label, 995), (GENERATED, 993)], end=1000) == [993, 980]
    assert kept([(label, 951)], end=1000) == [951]
    assert kept([], end=1000) == []


@settings(max_examples=300, deadline=None, database=None, derandomize=True)
@given(
    steps=st.lists(
        st.tuples(st.integers(1, 60), st.sampled_from([USER, PROMPT, GENERATED, ""])), max_size=120
    )
)
def test_what_is_kept_is_never_too_far_apart_and_never_many(steps: list[tuple[int, str]]) -> None:
    """However a conversation grows: a gap that was made by giving up is never too wide, since it
    only gets narrower in proportion, and their number grows with the logarithm of the length.
    """
    step, end, left = 10, 0, list[tuple[str, int]]()
    made = [0]
    for length, label in steps:
        end += length
        chosen = kept(left, end, step)
        left = [*(placed for placed in left if placed[1] in chosen), (label, end)]
        made.append(end)
        positions = [0, *(position for _, position in left)]
        for back, forth in zip(positions, positions[1:], strict=False):
            was_made_so = made.index(forth) - made.index(back) == 1
            assert was_made_so or end - back <= 3 * (end - forth) + step
        # Of any three in a row the last is three times as far as the first; and the two last ones.
        assert len(left) <= 2 * math.log(end / step + 3, 3) + 4


# A conversation that grows


@pytest.mark.parametrize("thought", [0, 5])
@pytest.mark.parametrize(("user", "answer"), [(2, 2), (6, 6), (3, 40)])
def test_forty_turns_leave_few_checkpoints(user: int, answer: int, thought: int) -> None:
    """Their number grows with the logarithm of the length; nothing else is left of the rest."""
    store = Checkpoints()
    chat = Chat(store, store.fresh(30), thought)
    counts = []
    for turn in range(1, 81):
        chat.turn(user, answer)
        if turn in (10, 20, 40, 80):
            counts.append(len(store))
    assert counts[2] <= 9
    assert all(more - fewer <= 2 for fewer, more in zip(counts, counts[1:], strict=False))
    longest = len(chat.generated)
    assert store.tree.tokens < longest + 8 * counts[-1] + 8


@pytest.mark.parametrize("thought", [0, 5])
@pytest.mark.parametrize(("user", "answer", "every"), [(6, 6, 0), (2, 90, 0), (100, 3, 16)])
def test_what_a_next_request_most_likely_wants_stays(
    user: int, answer: int, every: int, thought: int
) -> None:
    """In every turn: the newest, the ends of the last prompt and of the system prompt."""
    store = Checkpoints()
    system = store.fresh(29)
    chat = Chat(store, system, thought, every)
    for _ in range(40):
        chat.ask(user)
        assert store.hit([*chat.prompt, -1]) == len(chat.prompt)
        chat.answer(answer)
        assert store.hit([*chat.generated, -1]) == len(chat.generated)
        assert store.hit([*chat.prompt, -1]) == len(chat.prompt)
        assert store.hit([*system, -1]) == len(system)


def test_a_long_prompt_keeps_the_last_user_turn_and_the_last_of_itself() -> None:
    """While it is computed: it may be given up, and the turn before it be asked anew."""
    store = Checkpoints()
    chat = Chat(store, every=8)
    chat.turn(20, 20)
    before = list(chat.prompt)
    prompt = chat.generated + store.fresh(300)
    for position in range(len(chat.generated) + 8, len(prompt), 8):
        store.set(prompt[:position], PROMPT)
        assert store.hit([*prompt[:position], -1]) == position
        assert store.hit([*before, -1]) == len(before)
        if position > len(chat.generated) + 8:
            assert store.hit([*prompt[: position - 1], -1]) == position - 8


@pytest.mark.parametrize("thought", [0, 5])
@pytest.mark.parametrize(("user", "answer"), [(2, 2), (6, 6), (50, 20), (3, 60)])
def test_leaving_farther_back_costs_in_proportion(user: int, answer: int, thought: int) -> None:
    """Wherever a request leaves the conversation: what it has to compute anew is at most twice what
    came after, and a block or a turn.
    """
    store = Checkpoints()
    chat = Chat(store, thought=thought)
    for turn in range(60):
        chat.turn(user, answer)
        end = len(chat.generated)
        on_the_way = store.tree.checkpoints(MODEL, ids(chat.prompt))
        positions = [0, *sorted(position for _, position in on_the_way)]
        for start, following in zip(positions, positions[1:], strict=False):
            leaves = following - 1
            assert leaves - start <= 2 * (end - leaves) + max(8, user + answer), turn


# What was generated and left


def thinned(tree: BlockTree, letters: str, label: str) -> None:
    """Set a checkpoint, and give up what it makes needless."""
    insertion = put_checkpoint(tree, letters, label=label, row_bytes=10)
    thin(tree, MODEL, ids(letters), insertion.tip)
    tree.check()


def standing(tree: BlockTree) -> set[str]:
    """Where checkpoints stand."""
    return {"".join(map(letters_of, node.path())) for node in tree if not node.tokens}


LONG = "abcdefghijklm"


@pytest.mark.parametrize("shared", [0, 1, 3, 4, 6])
@pytest.mark.parametrize("prompt", [LONG[:end] for end in range(1, 10)])
def test_what_was_generated_goes_once_the_next_prompt_leaves_it(prompt: str, shared: int) -> None:
    """At once or after some of it, at a block's end, inside of one, or in a tail."""
    tree = make_tree(block_tokens=4)
    thinned(tree, prompt, USER)
    generated = prompt + "T" * 6 + "rst"
    thinned(tree, generated, GENERATED)
    assert standing(tree) == {prompt, generated}
    following = generated[: len(prompt) + shared] + "uvwxyzuvw"
    thinned(tree, following, USER)
    assert standing(tree) == {prompt, following}
    on_the_way = {node for node in tree if letters_of(node) and following.startswith(way_to(node))}
    assert {node for node in tree if node.tokens} == on_the_way


def way_to(node: Block) -> str:
    return "".join(map(letters_of, node.path()))


def test_all_answers_go_that_the_next_prompt_leaves() -> None:
    """The same prompt was answered more than once, and thinking left out of what follows."""
    tree = make_tree(block_tokens=4)
    for letters, label in {
        "abcde": USER,
        "abcdeTu": GENERATED,
        "abcdeTv": GENERATED,
        "abcdeTvwxyz": GENERATED,
        "abcdewww": PROMPT,
    }.items():
        thinned(tree, letters, label)
    assert standing(tree) == {"abcde", "abcdewww"}


def test_an_answer_alone_gives_up_no_other_one() -> None:
    """It does not say yet how the conversation goes on."""
    tree = make_tree(block_tokens=4)
    thinned(tree, "abcde", USER)
    for answer in ("Tu", "Tv", "Txyz"):
        thinned(tree, "abcde" + answer, GENERATED)
    assert standing(tree) == {"abcde", "abcdeTu", "abcdeTv", "abcdeTxyz"}


@pytest.mark.parametrize("prompt", [LONG[:end] for end in range(1, 10)])
def test_what_goes_on_from_the_end_of_a_prompt_is_not_left(prompt: str) -> None:
    """A checkpoint that is set before one that is there already says nothing against that."""
    tree = make_tree(block_tokens=4)
    generated = prompt + "T" * 6
    thinned(tree, prompt[:1], PROMPT)
    thinned(tree, generated, GENERATED)
    thinned(tree, prompt, USER)
    assert standing(tree) >= {prompt, generated}


@pytest.mark.parametrize("prompt", [LONG[:end] for end in range(1, 10)])
def test_another_answer_is_left_alone_where_one_is_gone_on_with(prompt: str) -> None:
    """Two chats may have begun alike: the other one can go on with its own."""
    tree = make_tree(block_tokens=4)
    thinned(tree, prompt, USER)
    thinned(tree, prompt + "this answer", GENERATED)
    thinned(tree, prompt + "that answer", GENERATED)
    thinned(tree, prompt + "this answer, and more", USER)
    assert {prompt, prompt + "that answer"} <= standing(tree)


def test_an_answer_that_was_gone_on_with_is_not_given_up() -> None:
    """Another branch of a conversation is one that someone may come back to."""
    tree = make_tree(block_tokens=4)
    for letters, label in {
        "abcde": USER,
        "abcdefg": GENERATED,
        "abcdefghi": USER,
        "abcdexyz": USER,  # an answer in other words, and gone on from there
        "abcdexyzabc": USER,
    }.items():
        thinned(tree, letters, label)
    assert {"abcde", "abcdefghi"} <= standing(tree)


@pytest.mark.parametrize("system", ["", "s", "sys", "syst", "system"])
@pytest.mark.parametrize("question", ["q", "question", "questions of many words"])
@pytest.mark.parametrize("is_evicted", [False, True])
def test_another_chat_is_left_alone(system: str, question: str, is_evicted: bool) -> None:
    """Whatever it shares with this one, and though its last prompt's end was evicted meanwhile."""
    tree = make_tree(block_tokens=4)
    if system:
        thinned(tree, system, SYSTEM)
    thinned(tree, system + question, USER)
    thinned(tree, system + question + "answer", GENERATED)
    if is_evicted:
        node, _ = tree.find_checkpoint(MODEL, ids(system + question))
        assert node is not None
        tree.remove(node)
    thinned(tree, system + "another question", USER)
    thinned(tree, system + "another question, its answer", GENERATED)
    thinned(tree, system + "another question, its answer, and more", USER)
    assert system + question + "answer" in standing(tree)


def test_a_question_about_the_same_text_is_left_alone() -> None:
    """It is told by the block that came with a prompt, though its checkpoint was evicted."""
    tree = make_tree(block_tokens=4)
    text = "a long text, "
    thinned(tree, text, PROMPT)
    thinned(tree, text + "who wrote it?", USER)
    thinned(tree, text + "who wrote it? nobody", GENERATED)
    node, _ = tree.find_checkpoint(MODEL, ids(text + "who wrote it?"))
    assert node is not None
    tree.remove(node)
    thinned(tree, text + "what is it about?", USER)
    assert text + "who wrote it? nobody" in standing(tree)


# Where another one forks off


@pytest.mark.parametrize("leaves", range(9, 20))
@pytest.mark.parametrize("forks", [False, True])
def test_a_checkpoint_stays_where_another_sequence_forks_off(leaves: int, forks: bool) -> None:
    """Whether it leaves at a block's end, inside of a block or of what was a tail once."""
    tree = make_tree(block_tokens=4)
    way = "".join(chr(ord("a") + position) for position in range(100))
    if forks:
        thinned(tree, way[:leaves] + "!!", USER)
    for end in range(8, 100, 2):
        thinned(tree, way[:end], PROMPT)
    _, position = tree.find_checkpoint(MODEL, ids(way[:leaves] + "!?"))
    fork = leaves - leaves % 2
    assert position == fork if forks else position < fork
    _, position = tree.find_checkpoint(MODEL, ids(way[: fork - 1] + "!?"))
    assert position < fork - 2  # the one before it is not needed for that


def test_a_fork_is_no_longer_one_once_the_other_sequence_is_gone() -> None:
    """What stayed for its sake alone goes with the next checkpoint."""
    store = Checkpoints(block_tokens=4)
    way = store.fresh(120)
    other = way[:11] + store.fresh(5)
    store.set(other, USER)
    for end in range(8, 110, 2):
        store.set(way[:end], PROMPT)
    assert store.hit([*way[:11], -1]) == 10
    node, position = store.tree.find_checkpoint(MODEL, ids(other))
    assert node is not None and position == len(other)
    store.tree.remove(node)
    store.set(way[:110], PROMPT)
    assert store.hit([*way[:11], -1]) < 10


# Anything that may happen

turns = st.one_of(
    st.tuples(st.just("ask"), st.integers(1, 30)),
    st.tuples(st.just("answer"), st.integers(0, 30)),
    st.tuples(st.just("turn"), st.integers(1, 12)),
    st.tuples(st.just("edit"), st.integers(0, 3)),
)


@settings(max_examples=300, deadline=None, database=None, derandomize=True)
@given(
    block_tokens=st.sampled_from([1, 2, 5, 8]),
    systems=st.lists(st.sampled_from([0, 8, 13]), min_size=1, max_size=3),
    thoughts=st.lists(st.sampled_from([0, 1, 7]), min_size=3, max_size=3),
    every=st.sampled_from([0, 0, 4, 16]),
    steps=st.lists(st.tuples(st.integers(0, 2), turns), max_size=40),
)
def test_whoever_goes_on_hits_the_end_of_the_last_prompt(
    block_tokens: int,
    systems: list[int],
    thoughts: list[int],
    every: int,
    steps: list[tuple[int, tuple[str, int]]],
) -> None:
    """Of whichever chat, whatever happened in the others, in whatever order; and the answer's end,
    if that is what it goes on from.
    """
    store = Checkpoints(block_tokens)
    shared = store.fresh(13)
    chats = [
        Chat(store, shared[:count], thought, every)
        for count, thought in zip(systems, thoughts, strict=False)
    ]
    for place, (action, number) in steps:
        chat = chats[place % len(chats)]
        if action == "ask":
            chat.ask(number)
        elif action == "turn":
            chat.turn(number, number)
        elif action == "answer" and chat.prompts:
            chat.answer(number)
        elif action == "edit" and number < len(chat.prompts):
            chat.edit(number)
            continue  # nothing was stored: what it goes back to may be given up long since
        for other in chats:
            if other.prompts and other.prompt is other.prompts[-1]:
                assert store.hit([*other.prompt, -1]) == len(other.prompt)
                assert store.hit([*other.generated, -1]) == len(other.generated)
            assert store.hit([*other.system, -1]) == len(other.system)
    at_most = sum(8 + 2 * len(chat.prompts) for chat in chats)
    assert len(store) <= at_most
