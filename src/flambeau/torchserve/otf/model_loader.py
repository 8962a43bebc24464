"""ModelLoader: loads the handler of a model folder into a HandlerService (`ts.model_loader`)."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from flambeau.archive.manifest import read_manifest
from flambeau.torchserve.otf.service import HandlerService
from flambeau.worker.loader import in_envelope, load_handler


class ModelLoader(ABC):
    @abstractmethod
    def load(
        self,
        model_name: str,
        model_dir: str,
        handler: str | None = None,
        gpu_id: int | None = None,
        batch_size: int | None = None,
        envelope: str | None = None,
        limit_max_image_pixels: bool = True,
    ) -> HandlerService:
        """Find the handler, initialize it and return its service."""


class TsModelLoader(ModelLoader):
    """Loads a model by the rules of this server's workers."""

    def load(
        self,
        model_name: str,
        model_dir: str,
        handler: str | None = None,
        gpu_id: int | None = None,
        batch_size: int | None = None,
        envelope: str | None = None,
        limit_max_image_pixels: bool = True,
        metrics_cache: Any = None,
    ) -> HandlerService:
        folder = Path(model_dir)
        manifest = read_manifest(folder)
        raw = dict(manifest.raw) if manifest else None
        service = HandlerService(
            *(model_name, model_dir, raw, None, gpu_id, batch_size), limit_max_image_pixels, metrics_cache
        )
        value = handler or (manifest.handler if manifest else "")
        entry = load_handler(value, folder, service.context, _event_loop())
        service._entry_point = in_envelope(entry, envelope or "", folder).handle
        return service


class ModelLoaderFactory:
    @staticmethod
    def get_model_loader() -> TsModelLoader:
        return TsModelLoader()


def _event_loop() -> asyncio.AbstractEventLoop:
    """The loop that `initialize` may use and that later calls run on."""
    policy = asyncio.get_event_loop_policy()
    try:
        return policy.get_event_loop()
    except RuntimeError:
        loop = policy.new_event_loop()
        policy.set_event_loop(loop)
        return loop
