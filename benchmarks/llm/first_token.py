"""How much later the first token of a stream comes through HTTP than from the engine alone, on the shipped model."""

import http.client
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "serving")]

from server import find_ports  # noqa: E402
from subject import MODEL, PROMPTS  # noqa: E402

TURNS = 30
STARTS_S = 120


class Served:
    """A server with the model, asked over one connection."""

    def __init__(self, port: int) -> None:
        self.port = port
        ports = ["--port", port, "--management-port", port + 1, "--metrics-port", port + 2]
        command = [sys.executable, "-m", "flambeau.cli.main", "llm", "serve", MODEL / "target", "--name", "gpt"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen([*map(str, [*command, *ports])], **quiet)
        deadline = time.monotonic() + STARTS_S
        while not self._is_ready():
            if time.monotonic() > deadline or self.process.poll() is not None:
                self.process.kill()
                raise RuntimeError("the server did not start")
            time.sleep(0.2)
        self._connection = http.client.HTTPConnection("127.0.0.1", port)

    def _is_ready(self) -> bool:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
            connection.request("GET", "/readyz")
            return connection.getresponse().status == 200
        except OSError:
            return False

    def first_token_s(self, prompt: str) -> float:
        """From the request to the first piece of its text."""
        body = json.dumps({"prompt": prompt, "max_new_tokens": 4, "temperature": 0, "stream": True})
        began = time.perf_counter()
        self._connection.request("POST", "/predictions/gpt", body, {"content-type": "application/json"})
        response = self._connection.getresponse()
        response.read1(1)
        seconds = time.perf_counter() - began
        response.read()
        return seconds

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


def main() -> None:
    from flambeau.llm import Engine, SamplingParams

    engine = Engine.from_pretrained(MODEL / "target", device="cpu")
    params = SamplingParams(temperature=0.0, max_tokens=4)

    def own_first_token_s(prompt: str) -> float:
        began = time.perf_counter()
        stream = engine.stream(prompt, params)
        for output in stream:
            if output.text:
                break
        seconds = time.perf_counter() - began
        for _ in stream:
            pass
        return seconds

    served = Served(find_ports())
    try:
        for prompt in PROMPTS[:8]:
            own_first_token_s(prompt)
            served.first_token_s(prompt)
        engine.wait_until_compiled()
        # Each prompt is asked of both in turn, with a word before it that no cache knows.
        pairs = []
        for i in range(TURNS):
            prompt = f"{i} {PROMPTS[i % len(PROMPTS)]}"
            pairs.append((own_first_token_s(prompt), served.first_token_s(prompt)))
    finally:
        served.stop()
        engine.close()
    own, through = (1000 * statistics.median(values) for values in zip(*pairs, strict=True))
    difference = 1000 * statistics.median(http - engine for engine, http in pairs)
    print(json.dumps({"engine_ms": own, "http_ms": through, "difference_ms": difference}))


if __name__ == "__main__":
    main()
