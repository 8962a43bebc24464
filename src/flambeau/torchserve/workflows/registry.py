"""WorkflowRegistry: registers, runs and unregisters the workflows of a server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

from flambeau.config.model import ModelConfig
from flambeau.errors import (
    DeadlinePassed,
    FlambeauError,
    WorkersFailed,
    WorkflowExists,
    WorkflowFailed,
    WorkflowNotFound,
)
from flambeau.serving.model import Model
from flambeau.serving.model_sources.downloader import shown
from flambeau.serving.model_sources.store import Source, Store
from flambeau.serving.registry import check_name
from flambeau.serving.server import Server
from flambeau.torchserve.workflows import execution
from flambeau.torchserve.workflows.source import WorkflowSource, open_workflow
from flambeau.torchserve.workflows.spec import WorkflowNode

logger = logging.getLogger(__name__)

POLL_S = 0.02


class Workflow:
    """One registered workflow; its nodes are models named `<workflow>__<node>`."""

    def __init__(self, name: str, source: WorkflowSource) -> None:
        self.name = name
        self.source = source
        self.num_running = 0

    def model_name(self, node: str) -> str:
        return f"{self.name}__{node}"


class WorkflowRegistry:
    """The workflows of one server, by name."""

    def __init__(self, server: Server, store: Store) -> None:
        self._server = server
        self._store = store
        self._workflows: dict[str, Workflow] = {}
        self._pending: set[str] = set()  # names being registered

    def __iter__(self) -> Iterator[Workflow]:
        return iter([self._workflows[name] for name in sorted(self._workflows)])

    @property
    def num_running(self) -> int:
        """Requests in progress, in all workflows."""
        return sum(workflow.num_running for workflow in self._workflows.values())

    def find(self, name: str) -> Workflow:
        """Raises WorkflowNotFound."""
        if name not in self._workflows:
            raise WorkflowNotFound(f"Workflow not found: {name}")
        return self._workflows[name]

    async def register(
        self,
        url: str,
        *,
        name: str | None = None,
        response_timeout_s: float | None = None,
        startup_timeout_s: float | None = None,
        signed: bool = False,
    ) -> Workflow:
        """Register a workflow with all its nodes, or none of them."""
        source = await open_workflow(self._store, url, signed=signed)
        workflow = Workflow(name or source.manifest.name, source)
        defaults = self._server.config
        config = ModelConfig(
            response_timeout_s=response_timeout_s or defaults.default_response_timeout_s,
            startup_timeout_s=startup_timeout_s or defaults.default_startup_timeout_s,
            queue_size=defaults.job_queue_size,
        )
        try:
            check_name(workflow.name)
            if workflow.name in self._workflows or workflow.name in self._pending:
                raise WorkflowExists(workflow.name)
            self._pending.add(workflow.name)
            try:
                await self._register_nodes(workflow, config)
                self._workflows[workflow.name] = workflow
            finally:
                self._pending.discard(workflow.name)
        except BaseException:
            await asyncio.to_thread(source.discard)
            raise
        logger.info("registered workflow %s from %s: %s", workflow.name, shown(url), source.spec.graph)
        return workflow

    async def unregister(self, name: str) -> None:
        """Remove a workflow after its accepted requests are answered."""
        workflow = self.find(name)
        del self._workflows[name]
        timeout_s = self._server.config.unregister_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                while workflow.num_running:
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise DeadlinePassed(f"Timed out while cleaning resources: {name}") from None
        finally:
            await self._unregister_nodes(workflow, [*workflow.source.spec.nodes])
            await asyncio.to_thread(workflow.source.discard)
        logger.info("unregistered workflow %s", name)

    async def predict(self, name: str, request: execution.WorkflowRequest) -> bytes:
        workflow = self.find(name)
        find = self._server.registry.find
        workflow.num_running += 1
        try:
            return await execution.run(workflow.source.spec, lambda node: find(workflow.model_name(node)), request)
        finally:
            workflow.num_running -= 1

    async def close(self) -> None:
        """Delete the unpacked files."""
        await asyncio.to_thread(self._store.close)

    async def _register_nodes(self, workflow: Workflow, config: ModelConfig) -> None:
        nodes = [*workflow.source.spec.nodes.values()]
        outcomes = await asyncio.gather(
            *(self._register_node(workflow, node, config) for node in nodes), return_exceptions=True
        )
        errors = {node: one for node, one in zip(nodes, outcomes, strict=True) if isinstance(one, BaseException)}
        if not errors:
            return
        await self._unregister_nodes(workflow, [node.name for node in nodes if node not in errors])
        causes = []
        for error in errors.values():
            if not isinstance(error, FlambeauError):
                raise error
            causes.append(error.cause)
        reasons = ", ".join(_reason(workflow.model_name(node.name), error) for node, error in errors.items())
        raise WorkflowFailed(
            f"Workflow {workflow.name} has failed to register. Failures: [{reasons}]",
            cause="\n".join(filter(None, causes)),
        )

    async def _register_node(self, workflow: Workflow, node: WorkflowNode, config: ModelConfig) -> Model:
        settings = node.settings
        source = None
        if node.is_function:
            source = Source(url="", folder=workflow.source.folder, manifest=None, origin=workflow.source.origin)
        return await self._server.register(
            node.url or "",
            source=source,
            name=workflow.model_name(node.name),
            handler=f"{workflow.source.manifest.handler}:{node.name}" if node.is_function else None,
            config=config,
            overrides={
                "min_workers": settings.max_workers,  # as in TorchServe, which starts the maximum
                "max_workers": settings.max_workers,
                "batch_size": settings.batch_size,
                "batch_delay_s": settings.max_batch_delay_ms / 1000,
            },
            workflow=workflow.name,
        )

    async def _unregister_nodes(self, workflow: Workflow, nodes: list[str]) -> None:
        names = [workflow.model_name(node) for node in nodes]
        outcomes = await asyncio.gather(*(self._server.unregister(name) for name in names), return_exceptions=True)
        for name, outcome in zip(names, outcomes, strict=True):
            if isinstance(outcome, FlambeauError):
                logger.warning("node %s of workflow %s: %s", name, workflow.name, outcome)
            elif isinstance(outcome, BaseException):
                raise outcome


def _reason(model: str, error: BaseException) -> str:
    if isinstance(error, WorkersFailed):
        return str(error)
    return f"Workflow Node {model} failed to register. Details: {error}"
