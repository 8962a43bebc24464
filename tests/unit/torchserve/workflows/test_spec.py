from __future__ import annotations

import pytest
import yaml

from flambeau.errors import InvalidGraph
from flambeau.torchserve.workflows.spec import read_spec


def read(text, *, has_handler=True):
    return read_spec(yaml.safe_load(text), has_handler=has_handler)


def refused(text, **options):
    with pytest.raises(InvalidGraph) as info:
        read(text, **options)
    return f"{info.value} {info.value.cause}"


def test_settings_for_all_count_for_models_listed_after_them():
    spec = read(
        """
        models:
          first: {url: a.mar}
          batch-size: 4
          max-workers: 3
          second: {url: b.mar, max-workers: 2, timeout-ms: 5}
          retry-attempts: 7
        dag:
          begin: [first]
          first: [second]
        """
    )
    first, second = spec.nodes["first"].settings, spec.nodes["second"].settings
    assert (first.batch_size, first.max_workers, first.max_batch_delay_ms) == (1, 1, 50)
    assert (second.batch_size, second.max_workers, second.timeout_ms, second.retry_attempts) == (4, 2, 5, 1)
    assert (spec.settings.max_workers, spec.settings.retry_attempts, spec.settings.timeout_ms) == (3, 7, 10_000)


def test_functions_take_one_request_at_a_time_and_the_last_of_the_other_settings():
    spec = read("{models: {m: {url: a.mar}, batch-size: 9, max-workers: 2, timeout-ms: 3}, dag: {begin: [m]}}")
    node = spec.nodes["begin"]
    assert node.is_function
    assert (node.settings.batch_size, node.settings.max_workers, node.settings.max_batch_delay_ms) == (1, 1, 0)
    assert node.settings.timeout_ms == 3
    assert not spec.nodes["m"].is_function


def test_the_text_of_a_graph_has_torchserves_format():
    spec = read("dag: {pre: [a, m1], a: [post], m1: [post], post: }")
    assert str(spec.graph) == "{pre=[a, m1], a=[post], m1=[post], post=[]}"
    assert spec.graph.order == ["pre", "a", "m1", "post"]
    assert spec.graph.before["post"] == ["a", "m1"]
    assert spec.graph.leaves == ["post"]


def test_order_follows_the_edges_not_the_document():
    spec = read("dag: {z: [end], a: [z, b], b: [end]}")
    assert spec.graph.order == ["a", "z", "b", "end"]


def test_models_outside_the_graph_are_left_alone():
    assert [*read("{models: {m: {url: a.mar}}, dag: {begin: []}}").nodes] == ["begin"]


@pytest.mark.parametrize(
    ("dag", "told"),
    [
        ("{}", "DAG should have only one start node"),
        ("{a: [c], b: [c]}", "DAG should have only one start node those that follow no other are: a, b"),
        ("{a: [b], b: [a]}", "DAG should have only one start node those that follow no other are: none"),
        ("{a: [a]}", "Self loop exception a follows itself"),
        ("{s: [a], a: [b], b: [a]}", "Not a valid DAG there is a way back to where it began among ['a', 'b']"),
    ],
)
def test_invalid_graphs_are_rejected(dag, told):
    assert refused(f"dag: {dag}").startswith(told)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[]", "a mapping with the keys models and dag"),
        ("", "a mapping with the keys models and dag"),
        ("models: {}", "dag must be a mapping"),
        ("{models: [], dag: {a: []}}", "models must be a mapping"),
        ("dag: {a: b}", "what follows a must be a list, not 'b'"),
        ("dag: {a: [1]}", "1 is not text, so it cannot name a node; put it in quotes"),
        ("dag: {no: [a]}", "False is not text"),
        (
            "{models: {batch-size: '3'}, dag: {a: []}}",
            "models: batch-size must be a whole number of at least 1, not '3'",
        ),
        ("{models: {max-workers: 0}, dag: {a: []}}", "at least 1, not 0"),
        ("{models: {timeout-ms: true}, dag: {a: []}}", "timeout-ms must be a whole number"),
        ("{models: {batchsize: 3}, dag: {a: []}}", "did you mean batch-size?"),
        ("{models: {m: }, dag: {m: []}}", "m is no setting, so it must be a mapping, with at least a url"),
        ("{models: {m: {batch-size: 2}}, dag: {m: []}}", "models: m needs a url"),
        ("{models: {m: {url: a.mar, batch-size: -2}}, dag: {m: []}}", "models: m: batch-size must be"),
        ("dag: {a: &x [[*x, *x]]}", "is not text"),
        ("dag: {a: [" + ",".join(f"b{i}" for i in range(1001)) + "]}", "more than 1000 edges"),
        ("dag: {a-b: []}", "a-b is no model, and no name that a function can have"),
    ],
)
def test_mistakes_are_named_with_their_place(text, told):
    assert told in refused(text)


def test_functions_need_a_handler():
    told = refused("{models: {m: {url: a.mar}}, dag: {begin: [m]}}", has_handler=False)
    assert "begin is no model, and there is no handler with such a function; models are m" in told
