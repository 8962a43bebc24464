"""Writes one network in every format: python export.py FOLDER [FORMAT …]."""

import sys
import warnings
import zipfile
from pathlib import Path

import torch
from net import Net

warnings.simplefilter("ignore")  # torch has a word to say about each of its older formats
EXAMPLE = torch.zeros(2, 4)
ANY_BATCH = ({0: torch.export.Dim("batch", min=1, max=64)},)


def state_dict(net, path):
    torch.save(net.state_dict(), path)


def legacy(net, path):
    torch.save(net.state_dict(), path, _use_new_zipfile_serialization=False)


def safetensors(net, path):
    from safetensors.torch import save_file

    save_file(net.state_dict(), path)


def whole(net, path):
    torch.save(net, path)


def torchscript(net, path):
    torch.jit.script(net).save(path)


def exported(net, path):
    torch.export.save(torch.export.export(net, (EXAMPLE,), dynamic_shapes=ANY_BATCH), path)


# Compiling is most of what the tests of formats cost: each of these halves it, and none changes what is written.
QUICKLY = {
    "aot_inductor.precompile_headers": False,
    "aot_inductor.compile_wrapper_opt_level": "O0",
    "compile_threads": 1,
    "cpp.vec_isa_ok": True,
}


def package(net, path):
    program = torch.export.export(net, (EXAMPLE,), dynamic_shapes=ANY_BATCH)
    torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=QUICKLY)


def library(net, path):
    """The library that lies in the package is the one that `torch._export.aot_compile` would write."""
    with zipfile.ZipFile(path.with_name(FILES["package"])) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".so")]
        path.write_bytes(archive.read(name))


def onnx(net, path):
    torch.onnx.export(net, (EXAMPLE,), path, dynamo=True, dynamic_shapes=ANY_BATCH, external_data=False, verbose=False)


FILES = {
    "state_dict": "net.pth",
    "legacy": "legacy.pth",
    "safetensors": "net.safetensors",
    "whole": "whole.pth",
    "torchscript": "net.pt",
    "exported": "net.pt2",
    "package": "package.pt2",
    "library": "net.so",
    "onnx": "net.onnx",
}

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    torch.manual_seed(0)
    network = Net().eval()
    for name in sys.argv[2:] or FILES:
        globals()[name](network, folder / FILES[name])
