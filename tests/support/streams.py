"""Replies that come line by line."""

from __future__ import annotations

import http.client
import json


class Stream:
    """One request, its reply read line by line."""

    def __init__(self, server, model, order, headers=()):
        self.connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        names = {"Content-Type": "application/json", **dict(headers)}
        self.connection.request("POST", f"/predictions/{model}", json.dumps(order).encode(), names)
        self.response = None

    def begin(self):
        self.response = self.connection.getresponse()
        return self.response

    def line(self):
        response = self.response or self.begin()
        return json.loads(response.readline())

    def rest(self):
        response = self.response or self.begin()
        lines = [json.loads(line) for line in response.read().splitlines()]
        self.connection.close()
        return lines

    def leave(self):
        if self.response is not None:
            self.response.close()
        self.connection.close()

    def is_broken_off(self):
        """Read to the end, which must not look like one."""
        try:
            self.rest()
        except http.client.IncompleteRead:
            return True
        finally:
            self.leave()
        return False
