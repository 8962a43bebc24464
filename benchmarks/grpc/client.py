"""A gRPC client process that calls in a closed loop and prints its results as JSON.

    python client.py TARGET CALL CONCURRENCY SECONDS BODY_BYTES

It sends and takes bytes, so that its own share of the machine is small; CALL is `predict` or `stream`.
"""

import asyncio
import json
import sys
import time

import grpc

SERVICE = "/org.pytorch.serve.grpc.inference.InferenceAPIsService"


def field(number: int, raw: bytes) -> bytes:
    """One field of a protobuf message."""
    return bytes([number << 3 | 2]) + varint(len(raw)) + raw


def varint(number: int) -> bytes:
    """A number as protobuf writes it."""
    digits = []
    while number > 127:
        digits.append(number & 127 | 128)
        number >>= 7
    return bytes([*digits, number])


def prediction(model: str, data: bytes) -> bytes:
    """A PredictionsRequest with one input."""
    return field(1, model.encode()) + field(3, field(1, b"data") + field(2, data))


async def load(target: str, call: str, concurrency: int, seconds: float, size: int) -> dict[str, float]:
    """Keep so many calls open for so long."""
    body = b'{"id": 123456, "pad": "' + b"x" * size + b'"}'
    message = prediction("bench", body)
    times: list[float] = []
    failures: list[str] = []
    async with grpc.aio.insecure_channel(target, options=[("grpc.max_receive_message_length", -1)]) as channel:
        predict = channel.unary_unary(f"{SERVICE}/Predictions")
        stream = channel.unary_stream(f"{SERVICE}/StreamPredictions")
        await predict(message)
        end = time.perf_counter() + seconds

        async def run() -> None:
            while (began := time.perf_counter()) < end:
                try:
                    if call == "predict":
                        await predict(message)
                    else:
                        async for _ in stream(message):
                            pass
                    times.append(time.perf_counter() - began)
                except grpc.RpcError as error:
                    failures.append(str(error))

        started = time.perf_counter()
        await asyncio.gather(*(run() for _ in range(concurrency)))
        elapsed = time.perf_counter() - started
    times.sort()
    return {
        "rps": round(len(times) / elapsed, 1),
        "p50_ms": round(times[len(times) // 2] * 1000, 2),
        "p99_ms": round(times[int(len(times) * 0.99)] * 1000, 2),
        "errors": len(failures),
    }


if __name__ == "__main__":
    target, call, concurrency, seconds, size = sys.argv[1:]
    print(json.dumps(asyncio.run(load(target, call, int(concurrency), float(seconds), int(size)))))
