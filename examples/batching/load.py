"""Sends 64 requests from 16 threads, and prints how they were answered."""

import json
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor


def ask(number):
    url = f"http://{sys.argv[1]}/predictions/batching"
    request = urllib.request.Request(url, json.dumps(number).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)


with ThreadPoolExecutor(16) as pool:
    answers = [*pool.map(ask, range(64))]
workers = {answer["worker"] for answer in answers}
largest = max(answer["batch"] for answer in answers)
print(f"{len(answers)} answers from {len(workers)} workers; batches of up to {largest}")
