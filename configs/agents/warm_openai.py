"""Imported once, before programs are forked: `preload: [openai, warm_openai]`.

OpenAI's SDK imports modules and builds the types of its answers when they are first used, which takes most of the
processor time of a short program. This module makes one request to a server of its own, so that no program has to.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import openai

CALL = {"id": "0", "type": "function", "function": {"name": "add", "arguments": "{}"}}
MESSAGE = {"role": "assistant", "content": "", "tool_calls": [CALL]}
ANSWER = {
    "id": "0",
    "object": "chat.completion",
    "created": 0,
    "model": "none",
    "choices": [{"index": 0, "finish_reason": "tool_calls", "message": MESSAGE}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(ANSWER).encode())

    def log_message(self, *words: object) -> None:
        """Log nothing."""


def warm() -> None:
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        server.timeout = 5.0  # the request does not arrive where a proxy is set for it
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        try:
            with openai.OpenAI(api_key="none", base_url=url, max_retries=0, timeout=5.0) as client:
                made = client.chat.completions.create(model="none", messages=[{"role": "user", "content": ""}])
                made.choices[0].message.model_dump(exclude_none=True)
        except openai.OpenAIError:
            pass  # programs then do it themselves
        thread.join()


warm()
