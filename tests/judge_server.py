"""A judge's server made with aiohttp, on a port of its own: it answers chat completions, and can be slow, broken or down."""

import asyncio
import json
import re
import threading
from contextlib import contextmanager

from aiohttp import web

#: What a judge is shown, as the default prompt writes it.
PART = re.compile(r"<part (\w+)>\n(.*)\n</part \1>", re.DOTALL)


def reply(content, **more):
    """A chat completion as OpenAI's API returns it."""
    message = {"role": "assistant", "content": content}
    choice = {"index": 0, "message": message, "finish_reason": "stop", **more}
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    return {"id": "x", "object": "chat.completion", "created": 0, "model": "judge", "choices": [choice], "usage": usage}


def verdict(word, reason="it says so"):
    return reply(json.dumps({"reason": reason, "verdict": word}))


def part_of(request):
    return PART.search(request["messages"][-1]["content"])[2]


class Server:
    """Answers by `answer(part, request, times asked)`: a dict, a `web.Response`, or None to close the connection."""

    def __init__(self, answer, delay=0.0):
        self.answer, self.delay = answer, delay
        self.requests, self.keys, self.now, self.most = [], [], 0, 0
        self.times = {}

    async def complete(self, request):
        body = await request.json()
        self.requests.append(body)
        self.keys.append(request.headers.get("Authorization"))
        part = part_of(body)
        self.times[part] = self.times.get(part, 0) + 1
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(self.delay)
            answer = self.answer(part, body, self.times[part])
            if asyncio.iscoroutine(answer):
                answer = await answer
        finally:
            self.now -= 1
        if answer is None:
            request.transport.abort()
            return web.Response()
        return web.json_response(answer) if isinstance(answer, dict) else answer

    @contextmanager
    def serving(self, port=0):
        """Serve in a thread, at `url`."""
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()

        def run(coroutine):
            asyncio.run_coroutine_threadsafe(coroutine, loop).result(10)

        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.complete)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        run(runner.setup())
        run(web.TCPSite(runner, "127.0.0.1", port).start())
        self.port = runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        try:
            yield self
        finally:
            run(runner.cleanup())
            loop.call_soon_threadsafe(loop.stop)
            thread.join(10)
            loop.close()
