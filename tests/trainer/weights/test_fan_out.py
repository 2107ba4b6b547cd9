"""Claims about the tree that weights fan out through: no circles, constant uplink, a way to the root for all."""

from __future__ import annotations

from example_counts import num_examples
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.weights.fan_out import ROOT, FanOutTree


def way_up(tree: FanOutTree, name: str) -> list[str]:
    way = [name]
    while way[-1] != ROOT:
        parent = tree.parent_of(way[-1])
        assert parent is not None, f"{way} leads nowhere"
        assert parent not in way, f"a circle: {way}"
        way.append(parent)
    return way


@settings(max_examples=num_examples(100), deadline=None)
@given(st.integers(1, 4), st.integers(0, 60))
def test_root_and_every_node_serve_at_most_their_width(width, num_nodes):
    tree = FanOutTree("root", width)
    for number in range(num_nodes):
        tree.join(f"w{number}", f"a{number}")
    for name in [ROOT, *(f"w{number}" for number in range(num_nodes))]:
        assert len(tree.children(name)) <= width
    assert tree.max_root_children <= width
    for number in range(num_nodes):
        way_up(tree, f"w{number}")


def test_tree_is_shallow():
    tree = FanOutTree("root", 2)
    for number in range(62):
        tree.join(f"w{number}", f"a{number}")
    assert max(len(way_up(tree, f"w{number}")) - 1 for number in range(62)) == 5


@st.composite
def histories(draw):
    return draw(st.integers(1, 3)), draw(
        st.lists(st.tuples(st.sampled_from(["join", "replace", "leave"]), st.integers(0, 12)), max_size=80)
    )


@settings(max_examples=num_examples(200), deadline=None)
@given(histories())
def test_no_circle_and_no_dead_parent_after_any_history(history):
    width, actions = history
    tree, alive, at = FanOutTree("root", width), set(), {}
    for action, number in actions:
        name = f"w{number}"
        if action == "join":
            at[name] = tree.join(name, f"a{number}")
            alive.add(name)
        elif action == "replace" and name in alive:
            lost = at[name]
            at[name] = tree.replace(name, f"a{number}", lost)
            if lost != "root":
                assert at[name] != lost
        elif action == "leave":
            tree.leave(name)
            alive.discard(name)
        for member in sorted(alive):
            if tree.parent_of(member) is None:  # its parent left: it notices, and asks
                at[member] = tree.replace(member, f"a{member[1:]}", at[member])
    for member in sorted(alive):
        way_up(tree, member)


def test_children_of_a_failed_node_are_taken_in_elsewhere_and_it_gets_no_more():
    tree = FanOutTree("root", 2)
    for number in range(6):
        tree.join(f"w{number}", f"a{number}")
    orphans = tree.children("w0")
    assert len(orphans) == 2
    for orphan in orphans:
        assert tree.replace(orphan, f"a{orphan[1:]}", "a0") != "a0"
    tree.leave("w5")
    for number in range(6, 12):
        tree.join(f"w{number}", f"a{number}")
    assert not tree.children("w0")
    assert tree.num_moved == 2


def test_a_worker_that_started_again_takes_a_new_place_under_its_new_address():
    tree = FanOutTree("root", 1)
    tree.join("w0", "old")
    assert tree.join("w1", "a1") == "old"
    assert tree.join("w0", "new") == "root"
    assert tree.parent_of("w1") is None
    assert tree.replace("w1", "a1", "old") == "root"


def test_with_no_room_left_the_root_takes_one_more_rather_than_none():
    tree = FanOutTree("root", 1)
    assert tree.join("w0", "a0") == "root"
    assert tree.join("w1", "a1") == "a0"
    assert tree.replace("w1", "a1", "a0") == "root"
    assert len(tree.children(ROOT)) == 2


def test_own_old_place_is_free_for_a_node_that_asks_for_another():
    tree = FanOutTree("root", 1)
    assert tree.join("w0", "a0") == "root"
    assert tree.replace("w0", "a0", "root") == "root", "the root never fails"
    assert (tree.num_moved, tree.max_root_children, tree.children(ROOT)) == (1, 1, ["w0"])


def test_node_that_is_not_known_under_its_address_comes_as_a_new_one():
    tree = FanOutTree("root", 1)
    assert tree.replace("w0", "a0", "somebody") == "root"
    assert tree.join("w1", "a1") == "a0"
    assert tree.replace("w0", "b0", "root") == "root", "it started again elsewhere"
    assert tree.num_moved == 0
    assert tree.parent_of("w1") is None


def test_parent_is_older_than_its_child_and_has_room():
    tree = FanOutTree("root", 2)
    for number in range(4):
        tree.join(f"w{number}", f"a{number}")
    assert [tree.parent_of(f"w{number}") for number in range(4)] == [ROOT, ROOT, "w0", "w0"]
    tree.leave("w1")
    assert tree.join("w4", "a4") == "root", "the oldest with room"
    assert tree.replace("w3", "a3", "a0") == "a2", "neither the one that failed nor a younger one"
    assert tree.parent_of("nobody") is None
    assert tree.parent_of(ROOT) == ROOT


def test_most_children_of_the_root_at_one_time_are_remembered():
    tree = FanOutTree("root", 2)
    for number in range(3):
        tree.join(f"w{number}", f"a{number}")
    tree.leave("w0")
    tree.leave("w1")
    assert (tree.children(ROOT), tree.max_root_children) == ([], 2)
