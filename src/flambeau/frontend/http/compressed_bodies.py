"""Bodies that clients send compressed: what their Content-Encoding names is undone before anything reads them."""

from __future__ import annotations

import asyncio
import zlib

from flambeau.errors import BadRequest, BodyTooLarge, UnsupportedEncoding
from flambeau.frontend.http.exchange import Exchange
from flambeau.serving.job import RequestBody

ENCODINGS = ("gzip", "deflate")
NAMES = {"x-gzip": "gzip", "identity": ""}
SLICE_BYTES = 64 * 1024
MAX_MEMBERS = 1000  # of a body that was compressed in portions
ANY_HEADER, NO_HEADER = 47, -15  # `wbits` of zlib: the header of gzip or zlib; none, which some clients call deflate


async def decode_body(exchange: Exchange, max_bytes: int) -> None:
    """Replace the body of a request by what was compressed. Raises BadRequest or one of its kinds."""
    encoding = NAMES.get(name := exchange.content_encoding.strip().lower(), name)
    exchange.content_encoding = ""
    if not encoding:
        return
    if encoding not in ENCODINGS:
        known = " and ".join(ENCODINGS)
        raise UnsupportedEncoding(f"The content-encoding {name[:100]!r} is not supported; {known} are, or none.")
    body = exchange.take_body()
    try:
        content = await asyncio.to_thread(decompress, body, encoding, max_bytes)
    finally:
        body.release()
    exchange.body = RequestBody(content)
    framing = ("content-encoding", "content-length")
    kept = [each for each in exchange.headers if each[0].lower() not in framing]
    exchange.headers = [*kept, ("content-length", str(len(content)))]


def decompress(body: RequestBody, encoding: str, max_bytes: int) -> bytes:
    """What a body holds, if that has at most `max_bytes`; blocks."""
    packed = body.content if body.segment is None else bytes(body.segment.memory[: body.size_bytes])
    try:
        return inflate(packed, ANY_HEADER, max_bytes)
    except zlib.error as error:
        problem = error
    if encoding == "deflate":
        try:
            return inflate(packed, NO_HEADER, max_bytes)
        except zlib.error:
            pass
    raise BadRequest(f"The body is not {encoding}, which its content-encoding names: {problem}.")


def inflate(packed: bytes, window: int, max_bytes: int) -> bytes:
    """The content of all members, one behind the other."""
    rest, place, content = memoryview(packed), 0, bytearray()
    for _ in range(MAX_MEMBERS):
        member = zlib.decompressobj(window)
        while not member.eof:
            piece = rest[place : place + SLICE_BYTES]  # of what is left of it, zlib makes a copy
            if not piece:
                raise BadRequest("The compressed body is incomplete.")
            content += member.decompress(piece, max_bytes - len(content) + 1)
            if len(content) > max_bytes:
                raise BodyTooLarge(
                    f"The request body is larger than {max_bytes} bytes when it is decompressed; the server's "
                    "max_request_size sets this limit."
                )
            place += len(piece) - len(member.unused_data)
        if place == len(packed):
            return bytes(content)
    raise BadRequest(f"The compressed body has more than {MAX_MEMBERS} members.")
