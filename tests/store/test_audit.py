"""The self-check finds every kind of fault: each is planted in a tree that was right."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest

from mlx_lm_kvcache_plugin.store.blocks import Block, Root
from mlx_lm_kvcache_plugin.store.tree import BlockTree
from tests.store.trees import Load, letters_of, make_tree, put, put_checkpoint


def sound_tree() -> BlockTree:
    """Blocks, tails and a checkpoint, in two namespaces."""
    tree = make_tree()
    put(tree, "abcdef")
    put(tree, "abxyz", label="user")
    put_checkpoint(tree, "pqr", namespace="other")
    tree.limit_bytes = tree.used_bytes
    return tree


def node(tree: BlockTree, letters: str) -> Block:
    return next(block for block in tree if letters_of(block) == letters)


def hang_twice(tree: BlockTree) -> None:
    node(tree, "xy").children[b"again"] = node(tree, "ef")


def forget_a_node(tree: BlockTree) -> None:
    tree._recency.remove(node(tree, "ef"))


def keep_an_orphan(tree: BlockTree) -> None:
    orphan = Block(node(tree, "cd"), b"orphan", Load(1), "user")
    tree._recency.append(orphan)


def lose_count_of_nodes(tree: BlockTree) -> None:
    tree._size += 1


def break_the_link_upwards(tree: BlockTree) -> None:
    node(tree, "ef").parent = node(tree, "ab")


def break_the_key(tree: BlockTree) -> None:
    node(tree, "ef").key = node(tree, "xy").key


def keep_a_node_for_nothing(tree: BlockTree) -> None:
    node(tree, "ef").payload = None


def forget_who_bears(tree: BlockTree) -> None:
    node(tree, "pq").is_bearer = False


def let_a_leaf_bear(tree: BlockTree) -> None:
    node(tree, "ef").is_bearer = True


def disorder(tree: BlockTree) -> None:
    tree._recency.touch(node(tree, "ef"))


def grow_a_block(tree: BlockTree) -> None:
    parent = node(tree, "ef")
    tree.limit_bytes += 10**4
    tree.add(parent, bytes(24), Load(1), "user")
    tree.touch(parent.children[bytes(24)])


def continue_a_tail(tree: BlockTree) -> None:
    tail = node(tree, "z")
    tree.limit_bytes += 10**4
    tree.add(tail, bytes(16), Load(1), "user")
    tree.touch(tail.children[bytes(16)])


def keep_an_empty_root(tree: BlockTree) -> None:
    tree._roots["third"] = Root("third")


def change_a_payload(tree: BlockTree) -> None:
    payload = node(tree, "ef").payload
    assert isinstance(payload, Load)
    payload.nbytes += 1


def miscount_bytes(tree: BlockTree) -> None:
    tree.used_bytes -= 1


def exceed_the_limit(tree: BlockTree) -> None:
    tree.limit_bytes -= 1


def miscount_tokens(tree: BlockTree) -> None:
    tree.tokens += 1


def miscount_sequences(tree: BlockTree) -> None:
    tree.sequences["user"] += 1


def miscount_bytes_of_a_label(tree: BlockTree) -> None:
    tree.bytes_by_label["user"] -= 1
    tree.bytes_by_label["assistant"] += 1


def miscount_tails_of_a_root(tree: BlockTree) -> None:
    node(tree, "ef").root.tally.tails += 1


def miscount_bytes_of_a_root(tree: BlockTree) -> None:
    node(tree, "ef").root.tally.used_bytes -= 1


def break_a_chain(tree: BlockTree) -> None:
    node(tree, "ef").chain ^= 1


def break_the_chain_of_a_root(tree: BlockTree) -> None:
    node(tree, "ef").root.chain ^= 1


FAULTS: dict[Callable[[BlockTree], None], str] = {
    hang_twice: "a node is reached twice",
    forget_a_node: "the tree and the recency list differ",
    keep_an_orphan: "the tree and the recency list differ",
    lose_count_of_nodes: "the number of nodes is wrong",
    break_the_link_upwards: "a link is broken",
    break_the_key: "a link is broken",
    keep_a_node_for_nothing: "a node that bears nothing holds nothing",
    forget_who_bears: "a node that bears nothing holds nothing",
    let_a_leaf_bear: "a leaf bears nothing",
    disorder: "a parent is older than its child",
    grow_a_block: "a block is too long",
    continue_a_tail: "a tail bears more than a checkpoint",
    keep_an_empty_root: "a root without children was kept",
    change_a_payload: "a node's size is stale",
    miscount_bytes: "used_bytes does not add up",
    exceed_the_limit: "the limit is exceeded",
    miscount_tokens: "tokens do not add up",
    miscount_sequences: "the number of sequences is wrong",
    miscount_bytes_of_a_label: "bytes by label do not add up",
    miscount_tails_of_a_root: "what the roots tell does not add up",
    miscount_bytes_of_a_root: "what the roots tell does not add up",
    break_a_chain: "a chain is wrong",
    break_the_chain_of_a_root: "a chain is wrong",
}


def test_a_sound_tree_passes() -> None:
    """The tree that faults are planted in has none, nor has an empty one."""
    sound_tree().check()
    make_tree(limit_bytes=0).check()


@pytest.mark.parametrize(
    ("plant", "complaint"), FAULTS.items(), ids=[plant.__name__ for plant in FAULTS]
)
def test_a_fault_is_named(plant: Callable[[BlockTree], None], complaint: str) -> None:
    """Each one by its own name, so that a failure says where to look."""
    tree = sound_tree()
    plant(tree)
    with pytest.raises(AssertionError, match=complaint):
        tree.check()


@pytest.fixture
def one_second() -> Iterator[None]:
    """For what would otherwise never end."""

    def give_up(*arguments: object) -> None:
        raise TimeoutError("the audit does not end")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, 1)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def close_a_circle(tree: BlockTree) -> None:
    node(tree, "ef").children[node(tree, "ab").key] = node(tree, "ab")


def close_the_recency_list(tree: BlockTree) -> None:
    node(tree, "ab").newer = node(tree, "ef")


@pytest.mark.usefixtures("one_second")
@pytest.mark.parametrize("plant", [close_a_circle, close_the_recency_list])
def test_a_circle_is_found_and_not_followed(plant: Callable[[BlockTree], None]) -> None:
    """Whether among the children or in the recency list: the audit ends and complains."""
    tree = sound_tree()
    plant(tree)
    with pytest.raises(AssertionError):
        tree.check()
