"""The compiled descriptors say what the .proto files say, and meet no other copy of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet

ROOT = Path(__file__).parents[4]
sys.path.insert(0, str(ROOT / "scripts"))
from protos import PROTOS, compile_protos  # noqa: E402


def files_in(path):
    """The files of a descriptor set that are ours, by name; what protoc brings along differs between versions."""
    found = FileDescriptorSet.FromString(path.read_bytes()).file
    return {file.name: file for file in found if not file.name.startswith("google/")}


def test_descriptors_are_up_to_date(tmp_path):
    compile_protos(tmp_path / "fresh")
    assert files_in(tmp_path / "fresh") == files_in(PROTOS / "descriptors.binpb"), "run: python scripts/protos.py"


def test_other_copies_of_the_files_can_be_loaded_beside_ours():
    program = (
        "from support.grpc_calls import stubs; made = stubs();"
        "import flambeau.frontend.grpc.frontend;"
        "from flambeau.frontend.grpc.messages import PredictionsRequest as Ours;"
        "theirs = made.inference_pb2.PredictionsRequest(model_name='m', input={'a': b'1'}, sequence_id='s');"
        "assert Ours.FromString(theirs.SerializeToString()).input['a'] == b'1';"
        "import tritonclient.grpc"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT / "tests")
