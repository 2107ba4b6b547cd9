"""An agent for verifiers 0.4 that needs no package: it sends the prompt, and then asks whether the answer is right."""

import json
import sys

import verifiers.v1 as v1

PROGRAM = """
import json, sys, urllib.request
url, key, model, prompt = sys.argv[1:5]
headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
messages = [{"role": "user", "content": prompt}]
for _ in range(2):
    body = json.dumps({"model": model, "messages": messages}).encode()
    request = urllib.request.Request(url + "/chat/completions", body, headers)
    message = json.load(opener.open(request))["choices"][0]["message"]
    messages += [message, {"role": "user", "content": "?"}]
"""


class TwoTurnsConfig(v1.HarnessConfig):
    pass


class TwoTurns(v1.Harness[TwoTurnsConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def setup(self, runtime):
        pass

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        _, prompt = self.resolve_prompt(data)
        text = prompt if isinstance(prompt, str) else json.dumps(prompt)
        return await runtime.run([sys.executable, "-c", PROGRAM, endpoint, secret, ctx.model, text], {})


__all__ = ["TwoTurns"]
