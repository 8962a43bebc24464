"""More workers than cores: those that compute take turns, those that wait do not."""

from __future__ import annotations

from flambeau.serving.workers.host_resources import count_cores


def most_at_a_time(spans) -> int:
    events = sorted([(span["from"], 1) for span in spans] + [(span["to"], -1) for span in spans])
    running = most = 0
    for _, change in events:
        running += change
        most = max(most, running)
    return most


def num_starts_in_a_crowd(spans, cores) -> int:
    """How many began while as many others as there are cores were running."""
    return sum(sum(o["from"] < span["from"] < o["to"] for o in spans) >= cores for span in spans)


def spans_of(server, order, count):
    futures = server.at_once(lambda body: server.predict("crowd", body), [order] * count)
    return [future.result().json for future in futures]


def test_workers_that_compute_run_as_many_at_a_time_as_there_are_cores(start):
    workers = count_cores() + 2
    server = start("crowd.py", "--workers", str(workers)).wait_ready()
    spans_of(server, {"do": "compute", "s": 0.2}, 2 * workers)  # from these it is learnt
    spans = spans_of(server, {"do": "compute", "s": 0.05}, 4 * workers)
    # A worker that a busy machine keeps from computing looks as if it waited, so one more may be let in now and then.
    assert num_starts_in_a_crowd(spans, count_cores()) <= len(spans) // 4


def test_workers_that_wait_all_wait_at_a_time(start):
    workers = count_cores() + 2
    server = start("crowd.py", "--workers", str(workers)).wait_ready()
    spans_of(server, {"do": "wait", "s": 0.3}, workers)
    assert most_at_a_time(spans_of(server, {"do": "wait", "s": 0.3}, 2 * workers)) == workers
