"""Compile the .proto files of the gRPC frontend: `python scripts/protos.py` writes protos/descriptors.binpb.

The result is a descriptor set, not Python modules: it works with every version of protobuf, and the server loads it
into a pool of its own, where it meets no other copy of the same files.
"""

import sys
import tempfile
from importlib import resources
from pathlib import Path

PROTOS = Path(__file__).parents[1] / "src" / "flambeau" / "frontend" / "grpc" / "protos"
OURS = "package org.pytorch.serve.grpc.openinference;"
THEIRS = "package inference;"  # what clients of the Open Inference Protocol call the same service


def compile_protos(target: Path) -> None:
    """Write the descriptors of all files, and of what they import, to `target`."""
    from google import rpc
    from grpc_tools import protoc

    with tempfile.TemporaryDirectory() as folder:
        twin = Path(folder) / "open_inference.proto"
        twin.write_text((PROTOS / "open_inference_grpc.proto").read_text().replace(OURS, THEIRS))
        includes = [PROTOS, folder, Path(rpc.__path__[0]).parents[1], resources.files("grpc_tools") / "_proto"]
        files = [*sorted(path.name for path in PROTOS.glob("*.proto")), twin.name, "google/rpc/error_details.proto"]
        words = ["protoc", *(f"-I{include}" for include in includes), "--include_imports"]
        if protoc.main([*words, f"--descriptor_set_out={target}", *files]):
            sys.exit("protoc failed")


if __name__ == "__main__":
    compile_protos(PROTOS / "descriptors.binpb")
