#!/usr/bin/env python3
"""Execute a notebook with this interpreter, in a folder: `python scripts/notebook.py notebooks/NAME.ipynb FOLDER`.

The executed notebook, with its outputs, is written into the folder. The exit status is 1 if a cell fails.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

CELL_S = 300


class ThisPython(AsyncKernelManager):
    """A kernel with the interpreter of this script, whatever kernels are installed."""

    @property
    def kernel_spec(self) -> KernelSpec:
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=command, language="python")


def main() -> None:
    notebook, folder = Path(sys.argv[1]), Path(sys.argv[2])
    document = nbformat.read(notebook, as_version=4)
    client = NotebookClient(document, km=ThisPython(), timeout=CELL_S, resources={"metadata": {"path": str(folder)}})
    try:
        client.execute()
    except CellExecutionError as error:
        sys.exit(f"{notebook}: {error}")
    nbformat.write(document, folder / notebook.name)


if __name__ == "__main__":
    main()
