"""The example of voice activity detection, packed as its README says."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
import wave
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

from flambeau.file_import import import_file  # noqa: E402

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "vad"
SPEECH = ROOT / "tests" / "support" / "audio" / "speech.wav"  # a synthetic voice between two silences
SPEECH_S = (0.7, 1.83)


def samples() -> np.ndarray:
    with wave.open(str(SPEECH)) as file:
        return np.frombuffer(file.readframes(file.getnframes()), np.int16)


def wav(data: np.ndarray, rate: int = 16_000, channels: int = 1) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(data.astype("<i2").tobytes())
    return buffer.getvalue()


def snippets(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (EXAMPLE / "README.md").read_text(), re.DOTALL)


def packed(folder: Path) -> list[Path]:
    """The archives that the README's own commands make."""
    if importlib.util.find_spec("silero_vad") is None:
        pytest.skip("the package silero-vad is not installed")
    shutil.copytree(EXAMPLE, folder / "vad")
    [commands] = snippets("sh")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    shell = ["bash", "-euo", "pipefail", "-c", commands]
    result = subprocess.run(
        shell, cwd=folder / "vad", env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stderr
    return [folder / "vad" / "model_store" / name for name in ("vad-pt.mar", "vad-onnx.mar")]


def assert_is_the_speech(segments) -> None:
    assert segments
    assert segments[0]["start"] == pytest.approx(SPEECH_S[0], abs=0.15)
    assert segments[-1]["end"] == pytest.approx(SPEECH_S[1], abs=0.15)
    assert sum(segment["end"] - segment["start"] for segment in segments) > 0.7


def test_both_forms_of_the_model_give_the_same(start, tmp_path):
    server = start(*packed(tmp_path), "--max-batch-delay", "200").wait_ready()
    speech, silence = samples(), np.zeros(32_000, np.int16)
    half_rate = speech[: len(speech) // 2 * 2].reshape(-1, 2).mean(1).astype(np.int16)
    requests = [
        (wav(speech), None),
        (wav(silence), None),
        (b"RIFF, but no WAV file", "not a WAV file that can be read"),
        (b"", "no audio in the request"),
        (wav(speech, 44_100), "1 channels of 16 bits at 44100 Hz"),
        (wav(speech, channels=2), "2 channels"),
        (wav(speech[:0]), "no samples"),
        (wav(half_rate, 8_000), None),
    ]
    heard = {}
    for model in ("vad-pt", "vad-onnx"):
        ask = lambda request, model=model: server.predict(model, request[0], kind="audio/wav")  # noqa: E731
        alone = ask(requests[0]).json
        assert_is_the_speech(alone)
        replies = [future.result() for future in server.at_once(ask, requests)]
        for reply, (_, reason) in zip(replies, requests, strict=True):
            assert reply.status == (400 if reason else 200)
            assert reason is None or (reason in reply.message and "send a WAV file" in reply.message)
        assert replies[0].json == alone
        assert replies[1].json == []
        assert_is_the_speech(replies[-1].json)
        good = [wav(np.concatenate([silence, speech])), wav(speech), wav(silence), wav(half_rate, 8_000)]
        heard[model] = [future.result().json for future in server.at_once(lambda body, ask=ask: ask([body]), good)]
        late = [{key: value - 2 for key, value in segment.items()} for segment in heard[model][0]]
        assert_is_the_speech(late)
        assert heard[model][1] == alone
    assert heard["vad-pt"] == heard["vad-onnx"]
    assert heard["vad-pt"][1] == json.loads(snippets("json")[0])


@pytest.mark.parametrize(
    ("chances", "expected"),
    [
        ([0.0] * 20, []),
        ([0.0] * 10 + [0.9] * 10 + [0.0] * 10, [(0.29, 0.67)]),
        ([0.9] * 10, [(0.0, 0.32)]),  # padding ends where the recording does
        ([0.9] * 5 + [0.0] * 10, []),  # too short
        ([0.9] * 5 + [0.0] * 2 + [0.9] * 5 + [0.0] * 9, [(0.0, 0.414)]),  # a short pause
        ([0.9] * 8 + [0.4] * 20 + [0.0] * 9, [(0.0, 0.926)]),  # below the threshold, but not by enough
        ([0.4] * 20, []),
        ([0.9] * 10 + [0.0] * 10 + [0.9] * 10, [(0.0, 0.35), (0.61, 0.96)]),
    ],
)
def test_probabilities_become_segments(chances, expected):
    handler = import_file(EXAMPLE / "handler.py")
    found = handler.find_speech(chances, len(chances) * 0.032, handler.Settings())
    assert [(segment["start"], segment["end"]) for segment in found] == [pytest.approx(pair) for pair in expected]
