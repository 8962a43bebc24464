"""Which machine gets the next worker."""

from __future__ import annotations

from flambeau.serving.cluster.node_choice import choose, demand_of
from flambeau.wire.cluster_messages import NodeInfo, Place

NODES = [NodeInfo(name, f"host-{name}", "10.0.0.1", True, {"CPU": 4.0, "GPU": 2.0}) for name in "abc"]


def place(agents=1, **options):
    names = [str(number) for number in range(agents)]
    return Place("p", names, names, "10.0.0.9:7075", "f", **options)


def chosen(wanted, used=None, occupants=(), nodes=NODES):
    return [node.id for node in choose(nodes, wanted, used or {}, occupants)]


def test_workers_are_spread():
    assert chosen(place(), occupants=["a", "a", "b"]) == ["c"]
    assert chosen(place(), occupants=["c", "a"]) == ["b"]


def test_workers_are_packed_if_asked():
    assert chosen(place(pack=True), occupants=["a", "b", "b"]) == ["b"]


def test_full_machine_is_left_out():
    assert chosen(place(gpus=1), used={"a": {"GPU": 1.5}}) == ["b"]
    assert chosen(place(gpus=3)) == []
    assert chosen(place(resources={"H200": 0.001})) == []


def test_group_gets_as_many_machines_or_none():
    assert chosen(place(3, gpus=2)) == ["a", "b", "c"]
    assert chosen(place(3, gpus=2), used={"b": {"GPU": 1}}) == []


def test_lost_machine_is_avoided_unless_no_other_could_do():
    assert chosen(place(avoid=["a", "b"])) == ["c"]
    assert chosen(place(avoid=["a", "b", "c"])) == ["a"]
    assert chosen(place(avoid=["b", "c"]), used={"a": {"CPU": 4}}) == []  # it waits for a


def test_agent_is_replaced_on_its_own_machine():
    assert chosen(place(node="b", host="host-b"), occupants=["b"]) == ["b"]
    assert chosen(place(node="old id", host="host-c")) == ["c"]  # the cluster was restarted
    assert chosen(place(node="old id", host="elsewhere")) == []


def test_dead_machine_is_not_used():
    dead = [NodeInfo("d", "host-d", "10.0.0.1", False, {"CPU": 64.0})]
    assert chosen(place(), nodes=dead) == []


def test_demand_has_no_zeros():
    assert demand_of(place(cpus=0.5, resources={"x": 1})) == {"CPU": 0.5, "x": 1}
