"""WAV files of handlers, and what is made of them."""

from __future__ import annotations

import io
import wave

import pytest

from flambeau.errors import InvalidField, JobFailed
from flambeau.frontend.openai import sounds
from flambeau.frontend.openai.sound_encoder import FORMATS
from flambeau.frontend.openai.sounds import (
    ENCODED,
    InvalidSound,
    Sound,
    SoundEncoder,
    check_next,
    check_pcm,
    read_wav,
    wav_file,
    wav_head,
)
from support.wav_files import wav_of


def read_back(file):
    with wave.open(io.BytesIO(file)) as reader:
        return reader.getparams()[:4], reader.readframes(reader.getnframes())


def test_files_are_joined():
    both = [read_wav(wav_of(b"abcd")), read_wav(wav_of(b"ef"))]
    assert wav_file(both) == wav_of(b"abcdef")
    odd = [Sound(read_wav(wav_of(width=1)).form, b"abc")]
    assert read_back(wav_file(odd)) == ((1, 1, 24_000, 3), b"abc")


def test_head_of_a_stream_leaves_its_end_open():
    form = read_wav(wav_of()).form
    head = wav_head(form, None)
    assert head[:4] + head[8:12] == b"RIFFWAVE"
    assert head[4:8] == head[-4:] == b"\xff" * 4
    assert read_wav(head + b"abcd") == Sound(form, b"abcd")


def test_other_chunks_are_left_out():
    file = wav_of()
    more = file[:12] + b"LIST\x03\0\0\0abc\0" + file[12:]
    assert read_wav(more) == read_wav(file)


@pytest.mark.parametrize("file", [b"", b"no sound", wav_of()[:30], wav_of()[:12], b"RIFF\0\0\0\0WAVEdata\0\0\0\0"])
def test_what_is_no_sound_is_refused(file):
    with pytest.raises(InvalidSound):
        read_wav(file)


def test_sounds_of_a_stream_have_one_format():
    with pytest.raises(InvalidSound, match="48000"):
        check_next(read_wav(wav_of()), read_wav(wav_of(rate=48_000)))


@pytest.mark.parametrize("options", [{"rate": 16_000}, {"channels": 2}, {"width": 1}])
def test_pcm_has_one_meaning(options):
    check_pcm(read_wav(wav_of()), "m")
    with pytest.raises(InvalidField, match="wav"):
        check_pcm(read_wav(wav_of(**options)), "m")


async def test_encoded_in_a_process():
    pytest.importorskip("soundfile")
    assert {*ENCODED} == {*FORMATS}
    file = wav_of(bytes(48_000))
    starts = {"mp3": b"\xff", "flac": b"fLaC", "opus": b"OggS"}
    for name, start in starts.items():
        found = await SoundEncoder().encode(file, name)
        assert found.startswith(start)
        assert len(found) < len(file)
    with pytest.raises(JobFailed, match="ask for wav"):
        await SoundEncoder().encode(wav_of(rate=22_050), "opus")


async def test_failed_encoder_is_an_error():
    with pytest.raises(JobFailed, match="cannot be encoded as mp3"):
        await SoundEncoder().encode(b"no sound", "mp3")


async def test_encoder_that_hangs_or_is_missing_is_an_error(monkeypatch):
    monkeypatch.setattr(sounds, "ENCODING_S", 0.01)
    with pytest.raises(JobFailed, match="more than"):
        await SoundEncoder(0).encode(b"", "mp3")
    monkeypatch.setattr(sounds, "ENCODING_S", 60)
    monkeypatch.setattr(sounds.sys, "executable", "/no/such/file")
    with pytest.raises(JobFailed, match="No such file"):
        await SoundEncoder().encode(b"", "mp3")
