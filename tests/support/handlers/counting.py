"""Generates without a model: counts from 0, one number a step, for many requests at a time."""

import os
import time

from flambeau.errors import BadRequest
from flambeau.wire.messages import Part

PLACES = 3


class Counting:
    """A job counts to `n`; it may ask for a pause in each step, for trouble, and for a reply in one piece."""

    places = PLACES
    abilities = ("generate",)

    def __init__(self):
        self.jobs = {}
        self.most = 0
        self.cancelled = 0

    @property
    def has_work(self):
        return bool(self.jobs)

    def join(self, request, row):
        order = row["body"]
        if "n" not in order:
            raise BadRequest("n is missing")
        made = int(request.state[-1]) if request.state else 0
        self.jobs[request.job_id] = {**order, "made": made, "text": ""}
        self.most = max(self.most, len(self.jobs))

    def step(self):
        parts = []
        time.sleep(max(job.get("pause", 0.0) for job in self.jobs.values()))
        for job_id, job in [*self.jobs.items()]:
            made, job["made"] = job["made"], job["made"] + 1
            if made == job.get("raise"):
                raise ValueError("as told")
            if made == job.get("fail"):
                parts.append((job_id, ValueError("as told")))
                del self.jobs[job_id]
                continue
            if made == job.get("exit"):
                os._exit(4)
            if made == job.get("hang"):
                time.sleep(60)
            last = job["made"] >= job["n"]
            job["text"] += f"{made} "
            if job.get("whole") and not last:
                continue
            text = job["text"] if job.get("whole") else f"{made} "
            state = str(job["made"]).encode() if job.get("resume") else b""
            headers = [("content-type", "text/event-stream")] if job.get("events") else None
            body = f"data: {text}\n\n" if job.get("events") else text
            parts.append(Part(job_id, body.encode(), last, headers=headers, state=state))
            if last:
                del self.jobs[job_id]
        return parts

    def cancel(self, job_id):
        del self.jobs[job_id]
        self.cancelled += 1

    def follow(self):
        raise AssertionError("there is one rank only")

    def close(self):
        assert not self.jobs


class CountingHandler:
    def initialize(self, context):
        self._counting = Counting()

    def generation(self):
        return self._counting

    def handle(self, data, context):
        counting = self._counting
        return [{"most": counting.most, "open": len(counting.jobs), "cancelled": counting.cancelled}]
