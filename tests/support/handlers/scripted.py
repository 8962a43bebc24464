"""Generates what its prompt says: a script of steps, each a list of pieces; any other prompt is answered with it.

`{"steps": [[[0, "Hell"]], [[0, "o", "stop"]]], "pause": 0.1, "fail": 1, "exit": 2}`: a piece is an index, a text and
maybe a reason, tokens, reasoning and calls; before the step of that number the job fails, or the process ends. With
`goes_on` the last step is made again and again; with `resume` another process goes on, and does not end.
"""

import json
import os
import signal
import time

from flambeau.errors import BadRequest
from flambeau.wire.generation import CallPiece, Piece, Token, decode_request, encode_pieces, given_options
from flambeau.wire.messages import Part
from flambeau.wire.tokenization import Detokenize, Detokenized, Tokenized, decode_tokenize, encode_reply


class Script:
    def __init__(self, request, state):
        prompt = request.messages[-1]["content"] if request.messages else request.prompts[0]
        if prompt == "refuse":
            raise BadRequest("the prompt has 5000 tokens; the model takes 4096")
        self.is_streamed = request.stream
        self.orders = {}
        if isinstance(prompt, str) and prompt.startswith("{"):
            self.orders = json.loads(prompt)
        else:
            self.orders["steps"] = [self.answer(request, prompt)]
        self.made = []
        self.num_done = int(state[-1]) if state else 0
        if state:
            self.orders.pop("exit", None)

    @staticmethod
    def answer(request, prompt):
        """What was asked, as it arrived, for each choice."""
        told = prompt
        if prompt == "report":
            told = json.dumps(
                {
                    "sampling": given_options(request.sampling),
                    "tools": request.tools,
                    "options": request.template_options,
                }
            )
        num_choices = given_options(request.sampling).get("n", 1) * max(1, len(request.prompts))
        return [[index, str(told), "stop"] for index in range(num_choices)]

    def step(self):
        steps = self.orders["steps"]
        pieces = [to_piece(*piece) for piece in steps[min(self.num_done, len(steps) - 1)]]
        self.num_done += 1
        return pieces

    @property
    def is_done(self):
        return self.num_done >= len(self.orders["steps"]) and not self.orders.get("goes_on")


def to_piece(index, text, reason=None, tokens=None, reasoning="", calls=()):
    made = [
        Token(i, token, logprob, bytes(data), [(0, t, lp, t.encode()) for t, lp in top])
        for i, (token, logprob, data, top) in enumerate(tokens or ())
    ]
    counts = (11, 7, 4, 6, 5) if reason else (0, 0, 0, 0, 0)
    pieces = [CallPiece(*call) for call in calls]
    return Piece(index, text, reason, made or None, *counts, reasoning=reasoning, calls=pieces)


class Scripted:
    abilities = ("generate", "chat", "tokenize")

    def __init__(self, places):
        self.places = places
        self.jobs = {}
        self.num_cancelled = 0

    @property
    def has_work(self):
        return bool(self.jobs)

    def join(self, request, row):
        self.jobs[request.job_id] = Script(decode_request(row["body"]), request.state)

    def tokenize(self, request, body):
        """Each character is a token, and each message begins with token 0."""
        asked = decode_tokenize(body)
        if isinstance(asked, Detokenize):
            return encode_reply(Detokenized(text="".join(map(chr, asked.tokens))))
        texts = [asked.prompt] if asked.messages is None else [f"\0{one['content']}" for one in asked.messages]
        ids = [ord(character) for text in texts for character in text]
        return encode_reply(Tokenized(tokens=ids, texts=[*map(chr, ids)] if asked.has_texts else None, max_length=99))

    def step(self):
        made = []
        time.sleep(max(job.orders.get("pause", 0) for job in self.jobs.values()))
        for job_id, job in [*self.jobs.items()]:
            if job.num_done == job.orders.get("exit"):
                os.kill(os.getpid(), signal.SIGKILL)
            if job.num_done == job.orders.get("fail"):
                del self.jobs[job_id]
                made.append((job_id, RuntimeError("as the script says")))
                continue
            job.made += job.step()
            if job.is_streamed or job.is_done:
                state = b"%d" % job.num_done if job.orders.get("resume") else b""
                made.append(Part(job_id, encode_pieces(job.made), job.is_done, state=state))
                job.made = []
            if job.is_done:
                del self.jobs[job_id]
        return made

    def cancel(self, job_id):
        del self.jobs[job_id]
        self.num_cancelled += 1

    def close(self):
        pass


class ScriptedHandler:
    def initialize(self, context):
        self._scripted = Scripted(context.model_yaml_config.get("places", 64))

    def generation(self):
        return self._scripted

    def handle(self, data, context):
        return [{"open": len(self._scripted.jobs), "cancelled": self._scripted.num_cancelled}]
