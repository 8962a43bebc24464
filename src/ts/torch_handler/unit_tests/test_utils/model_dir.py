"""What handlers' own tests import from `ts.torch_handler.unit_tests.test_utils.model_dir`."""

from __future__ import annotations

import shutil
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlparse


def download_model(model_url: str, model_dir: Path) -> None:
    """Download weights as `model.pt`; a copy is kept for the next time."""
    kept = Path.home() / ".cache" / "flambeau" / "test-models" / Path(urlparse(model_url).path).name
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial, _ = urllib.request.urlretrieve(model_url)
        shutil.move(partial, kept)
    shutil.copy(kept, model_dir / "model.pt")


def copy_files(src_dir: Path, dst_dir: Path, files: Mapping[str, str]) -> None:
    """Copy files to a folder, each under a new name."""
    for source, name in files.items():
        shutil.copyfile(src_dir / source, dst_dir / name)
