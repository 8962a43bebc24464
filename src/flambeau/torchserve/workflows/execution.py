"""Runs one request through a workflow: each node starts when all its predecessors have answered."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flambeau.errors import FlambeauError, NodeFailed
from flambeau.serving.job import Job, ReplyCollector, RequestBody, priority_of
from flambeau.serving.model import Model
from flambeau.serving.traces import RequestTrace
from flambeau.torchserve.workflows.spec import WorkflowNode, WorkflowSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowRequest:
    request_id: str
    headers: list[tuple[str, str]]
    body: bytes
    trace: RequestTrace | None = None


@dataclass(frozen=True, slots=True)
class NodeInput:
    """The input of a node: the client's body, or the joined answers of its predecessors."""

    content: bytes
    fields: list[tuple[str, int]] | None = None

    @classmethod
    def from_answers(cls, answers: Mapping[str, bytes]) -> NodeInput:
        """A single answer becomes the body; several are fields named after their nodes."""
        if len(answers) == 1:
            [content] = answers.values()
            return cls(content, [("body", len(content))])
        return cls(b"".join(answers.values()), [(name, len(content)) for name, content in answers.items()])


async def run(spec: WorkflowSpec, find: Callable[[str], Model], call: WorkflowRequest) -> bytes:
    """Run all branches concurrently and return the answer; a failure or cancellation ends all of them."""
    tasks: dict[str, asyncio.Task[bytes]] = {}

    async def run_one(name: str) -> bytes:
        before = {other: await tasks[other] for other in spec.graph.before[name]}
        given = NodeInput.from_answers(before) if before else NodeInput(call.body)
        return await run_node(spec.nodes[name], find, call, given)

    try:
        async with asyncio.TaskGroup() as group:
            for name in spec.graph.order:
                tasks[name] = group.create_task(run_one(name))
    except BaseExceptionGroup as errors:
        raise _first(errors) from None
    return combine({name: tasks[name].result() for name in spec.graph.leaves})


async def run_node(node: WorkflowNode, find: Callable[[str], Model], call: WorkflowRequest, given: NodeInput) -> bytes:
    """Call a node, with as many retries as its settings allow."""
    attempts = node.settings.retry_attempts
    reason = ""
    for attempt in range(attempts + 1):
        try:
            return await _ask(find(node.name), node, call, given)
        except TimeoutError:
            reason = f"no answer within {node.settings.timeout_ms} ms (timeout-ms)"
        except FlambeauError as error:
            reason = "\n".join(filter(None, [str(error), error.cause]))
        logger.warning("request %s: node %s, attempt %d: %s", call.request_id, node.name, attempt, reason)
    text = f"Failed to execute workflow Node after {attempts} attempts : Error executing {node.name}"
    logger.error("request %s: %s", call.request_id, text)
    raise NodeFailed(node.name, cause=f"{text}\n{reason}")


async def _ask(model: Model, node: WorkflowNode, call: WorkflowRequest, given: NodeInput) -> bytes:
    answer = ReplyCollector()
    job = Job(
        answer,
        request_id=call.request_id,
        headers=call.headers,
        body=RequestBody(given.content),
        arrived=asyncio.get_running_loop().time(),
        fields=given.fields,
    )
    job.priority = priority_of(call.headers)
    if call.trace is not None:
        call.trace.add(job, model.name, model.version)
    model.add(job)
    try:
        async with asyncio.timeout(node.settings.timeout_ms / 1000):
            return await answer.done
    finally:
        job.cancel()


def combine(answers: Mapping[str, bytes]) -> bytes:
    """The answer of a single leaf unchanged; of several, a JSON object with one entry each."""
    if len(answers) == 1:
        [content] = answers.values()
        return content
    documents = {name: _object(name, content) for name, content in answers.items()}
    return (json.dumps(documents, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def _object(name: str, content: bytes) -> dict[str, Any]:
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise NodeFailed(name, cause=f"nothing follows {name}, nor other nodes: each of them must answer a JSON object")
    return document


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error of the node that failed first; later ones only repeat it."""
    found: Sequence[BaseException] = errors.exceptions
    return _first(found[0]) if isinstance(found[0], BaseExceptionGroup) else found[0]
