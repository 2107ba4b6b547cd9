"""Imported once, before programs are forked: `preload: [openai, warm_openai]`.

OpenAI's SDK imports modules and builds the types of its answers when they are first used, and reads the certificate
authorities for each client, even one without TLS. Both take most of the processor time of a short program. This module
makes one request to a server of its own, and keeps the certificates, so that no program has to.
"""

import contextlib
import json
import os
import sys
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
        server.timeout = 5.0
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        try:
            direct = openai.DefaultHttpxClient(trust_env=False)  # not through a proxy
            with openai.OpenAI(api_key="none", base_url=url, max_retries=0, timeout=5.0, http_client=direct) as client:
                made = client.chat.completions.create(model="none", messages=[{"role": "user", "content": ""}])
                made.choices[0].message.model_dump(exclude_none=True)
        except openai.OpenAIError:
            pass  # programs then do it themselves
        thread.join()


def keep_certificates() -> None:
    """Let clients of HTTPX without settings of their own for TLS share one context: a program that changes the context
    of one client changes it for all. Does nothing for a release of HTTPX that makes its contexts elsewhere.
    """
    for name in ("httpx._transports.default", "httpx2._transports.default"):
        transports = sys.modules.get(name)
        if make := getattr(transports, "create_ssl_context", None):
            transports.create_ssl_context = keeping(make)
            with contextlib.suppress(OSError):  # programs then say what is wrong with the certificates
                transports.create_ssl_context()


def keeping(make):
    """`make(verify, cert, trust_env)` that returns the same context where all arguments have their defaults."""
    kept = {}

    def context(verify=True, cert=None, trust_env=True):
        if verify is not True or cert is not None or trust_env is not True:
            return make(verify=verify, cert=cert, trust_env=trust_env)
        files = os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")
        if files not in kept:
            kept[files] = make(verify=verify, cert=cert, trust_env=trust_env)
        return kept[files]

    return context


keep_certificates()
warm()
