"""How long 1,000 questions to a server that takes 200 ms take, beside the bound, and the same again from the cache.

    python benchmarks/judges.py [--items 1000] [--delay 0.2] [--concurrent 64]

The bound is items / concurrent x delay. The server runs in a process of its own. Needs `spanwise[judge]` and aiohttp.
"""

import argparse
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from judge_server import Server, verdict
from spanwise import Objective, score_all


def serve(delay, pipe):
    """Serve until the pipe says something; tell the most requests that were in flight."""
    with Server(lambda part, request, times: verdict("yes"), delay).serving() as server:
        pipe.send(server.url)
        while pipe.recv() != "end":
            pipe.send((len(server.requests), server.most))


def ask(url, items, concurrent, cache):
    """Return the seconds that a batch of different questions takes."""
    text = [{"part": {"": f"step {n} of a proof"}} for n in range(items)]
    options = {"model": "judge", "base_url": url, "max_concurrent": concurrent, "cache": cache}
    started = time.perf_counter()
    scores = score_all([Objective("judge", pays="part", options=options)], text, columns={})
    seconds = time.perf_counter() - started
    assert scores.reward_nm.sum() == items
    return seconds


def main():
    """Print the seconds of the first and of the second run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--items", type=int, default=1000)
    parser.add_argument("--delay", type=float, default=0.2)
    parser.add_argument("--concurrent", type=int, default=64)
    given = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(given.delay, theirs), daemon=True)
    server.start()
    url, bound = ours.recv(), given.items / given.concurrent * given.delay
    with tempfile.TemporaryDirectory() as folder:
        ask(url, 8, 8, None)  # loads the client
        first, second = (ask(url, given.items, given.concurrent, f"{folder}/judge.sqlite") for _ in range(2))
    ours.send("count")
    requests, most = ours.recv()
    ours.send("end")
    print(f"bound {bound:.2f} s, first run {first:.2f} s ({first / bound:.2f}), second run from the cache {second:.2f} s")
    print(f"{requests} requests, at most {most} at a time")


if __name__ == "__main__":
    main()
