"""Questions to a judge's server that a process of its own can ask: it imports this file, and no tokenizer."""

from judge_server import Server, verdict
from spanwise import Objective, score_all

TEXT = [{"step": {"": f"step {n}"} if n != 3 else None, "end": {"": f"end {n}"}} for n in range(6)]
COLUMNS = {"prompt": [f"task {n}" for n in range(6)]}


def judged(server, *, text=TEXT, columns=COLUMNS, pays="step", **options):
    options = {"model": "judge", "base_url": server.url, **options}
    return score_all([Objective("judge", pays=pays, options=options)], text, columns=columns)


def even(part, request, times):
    return verdict("yes" if int(part.split()[-1]) % 2 == 0 else "no", f"I read {part}")


def ask_from_afar(url, cache):
    server = Server(even)
    server.url = url
    return judged(server, cache=cache).reward_nm[0, 0].item()
