"""NumPy's bytes ↔ arrays."""

from __future__ import annotations

import io
import zipfile

import pytest

from flambeau.errors import BadRequest

np = pytest.importorskip("numpy")

from flambeau.handlers.onnx.npy import is_npy, is_npz, read_npy, read_npz, write_npy, write_npz  # noqa: E402


def saved(array, **options) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, **options)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "array",
    [np.arange(6, dtype=np.float32).reshape(2, 3), np.asfortranarray(np.arange(6).reshape(2, 3)), np.array(7, ">i4")],
)
def test_files_of_numpy_are_read(array):
    raw = bytearray(saved(array))
    assert is_npy(raw)
    assert np.array_equal(read_npy(raw), array)
    assert np.array_equal(np.load(io.BytesIO(write_npy(array))), array)


def test_npz_is_read_and_written_by_name():
    buffer = io.BytesIO()
    np.savez_compressed(buffer, a=np.ones(2), b=np.zeros((2, 2)))
    arrays = read_npz(buffer.getvalue(), 10_000)
    assert is_npz(buffer.getvalue())
    assert {name: array.shape for name, array in arrays.items()} == {"a": (2,), "b": (2, 2)}
    loaded = np.load(io.BytesIO(write_npz({"file": np.ones(3), "dotted.name": np.zeros(1)})))
    assert loaded["file"].tolist() == [1, 1, 1]
    assert loaded["dotted.name"].tolist() == [0]


def header(text: str) -> bytes:
    padded = text.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (saved(np.array([{}]), allow_pickle=True), "never unpickled"),
        (saved(np.arange(100))[:-1], "buffer is smaller"),
        (saved(np.arange(3))[:20], "cannot be read"),
        (b"\x93NUMPY\x09\x00" + b"\x00" * 20, "cannot be read"),
        (header("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000000,)}"), "buffer is smaller"),
        (header("{'descr': '<f4', 'fortran_order': False, 'shape': (10000000000000000000000,)}"), "cannot be read"),
        (header("__import__('os').abort()"), "cannot be read"),
    ],
)
def test_bad_npy_is_rejected(raw, reason):
    with pytest.raises(BadRequest, match=reason):
        read_npy(raw)


def test_bad_npz_is_rejected():
    with pytest.raises(BadRequest, match=r"numpy\.savez"):
        read_npz(b"PK\x03\x04 and nothing more", 100)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", b"\x00" * 1_000_000)
    assert len(buffer.getvalue()) < 2_000
    with pytest.raises(BadRequest, match="max_unpacked_bytes is 100000"):
        read_npz(buffer.getvalue(), 100_000)
    corrupt = bytearray(write_npz({"x": np.arange(100)}))
    corrupt[200] ^= 0xFF
    with pytest.raises(BadRequest, match="CRC"):
        read_npz(corrupt, 10_000)


def lying_npz(method: int) -> bytes:
    """A .npz whose one entry declares 100 bytes and unpacks to 20 MB."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        archive.writestr("x.npy", bytes(20_000_000))
    raw = bytearray(buffer.getvalue())
    true, false = (20_000_000).to_bytes(4, "little"), (100).to_bytes(4, "little")
    assert raw.count(true) == 2  # in the entry's own header and in the directory
    return bytes(raw.replace(true, false))


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_npz_with_a_false_size_is_not_unpacked(method):
    import tracemalloc

    raw = lying_npz(method)
    tracemalloc.start()
    try:
        with pytest.raises(BadRequest):
            read_npz(raw, 1_000_000)
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()
