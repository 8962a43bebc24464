"""Prints each line with the time since the first one: lines arrive while the handler still works."""

import http.client
import json
import sys
import time

connection = http.client.HTTPConnection(sys.argv[1])
connection.request(
    "POST", "/predictions/streaming", json.dumps({"text": "a b c"}), {"Content-Type": "application/json"}
)
response = connection.getresponse()
began = time.monotonic()
while line := response.readline():
    print(f"{time.monotonic() - began:.2f} s", line.decode().strip())
