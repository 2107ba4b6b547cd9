"""A client of a run with `workflow: traffic`: has conversations about sums, and sends their rewards. Uses no packages.

    python configs/agents/traffic_sum.py http://127.0.0.1:8001

It stands for the users of a deployed program. They add digits with a calculator as their tool, and some of them never
say how the answer was.
"""

import argparse
import http.client
import json
import os
import random
import threading
import time
import urllib.error
import urllib.request

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}},
    },
}
MAX_TURNS = 16
HEADER = "X-Areal-Like-Conversation"


class Gone(Exception):
    """The address has not answered for too long."""


class Client:
    """Sends requests; repeats them while the address is not open, because a worker may be restarted."""

    def __init__(self, address, patience_s):
        self.address, self.patience_s = address, patience_s
        self.key = os.environ.get("TRAFFIC_KEY", "")

    def post(self, path, body, conversation=""):
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        if conversation:
            headers[HEADER] = conversation
        request = urllib.request.Request(self.address + path, json.dumps(body).encode(), headers)
        until = time.monotonic() + self.patience_s
        while True:
            try:
                with urllib.request.urlopen(request, timeout=300) as answer:
                    return answer.status, json.load(answer)
            except urllib.error.HTTPError as error:
                if error.code not in (429, 503):
                    return error.code, json.load(error)
            except (OSError, http.client.HTTPException):  # not open, or its worker was killed
                pass
            if time.monotonic() > until:
                raise Gone
            time.sleep(0.2)


def converse(client, numbers):
    """Have one conversation. Returns its id and whether the answer was correct, or None if it failed."""
    messages = [{"role": "user", "content": "+".join(map(str, numbers)) + "="}]
    conversation = ""
    for _ in range(MAX_TURNS):
        body = {"model": "policy", "messages": messages, "tools": [ADD]}
        status, answer = client.post("/v1/chat/completions", body, conversation)
        if status != 200:
            return None
        conversation = answer["conversation_id"]
        message = answer["choices"][0]["message"]
        messages.append(message)
        if not message.get("tool_calls"):
            break
        for call in message["tool_calls"]:
            given = json.loads(call["function"]["arguments"])
            try:
                result = str((int(given["x"]) + int(given["y"])) % 10)
            except (KeyError, TypeError, ValueError):
                result = "?"
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    said = (messages[-1].get("content") or "").rpartition("#")[2]
    return conversation, said == str(sum(numbers) % 10)


class Users:
    """Several users at once."""

    def __init__(self, client, options):
        self.client, self.options = client, options
        self.lock = threading.Lock()
        self.random = random.Random(options.seed)
        self.left = options.conversations or float("inf")
        self.correct, self.counts = [], {"rewards": 0, "not_used": 0, "without_reward": 0, "failed": 0}

    def next_numbers(self):
        """Digits of the next conversation, and whether its user will send a reward; None: it was the last."""
        with self.lock:
            if self.left <= 0:
                return None
            self.left -= 1
            numbers = [self.random.randrange(10) for _ in range(self.random.randint(2, self.options.max_terms))]
            return numbers, self.random.random() >= self.options.silent

    def count(self, name, correct=None):
        with self.lock:
            self.counts[name] += 1
            if correct is None:
                return
            self.correct.append(correct)
            if len(self.correct) % self.options.every == 0:
                share = sum(self.correct[-self.options.every :]) / self.options.every
                print(
                    f"{len(self.correct)} conversations, {share:.3f} correct in the last {self.options.every}",
                    flush=True,
                )

    def run(self):
        while (asked := self.next_numbers()) is not None:
            numbers, sends_reward = asked
            try:
                made = converse(self.client, numbers)
                if made is None:
                    self.count("failed")
                    continue
                conversation, is_correct = made
                self.count("without_reward" if not sends_reward else "rewards", is_correct)
                if sends_reward:
                    time.sleep(self.options.delay_s)
                    body = {"conversation_id": conversation, "reward": float(is_correct)}
                    status, _ = self.client.post("/rl/reward", body)
                    if status != 200:
                        self.count("not_used")
            except Gone:
                return


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address", help="address of the rollout worker, such as http://127.0.0.1:8001")
    parser.add_argument("--users", type=int, default=32, help="conversations at once")
    parser.add_argument("--conversations", type=int, default=0, help="number of conversations; 0: until the run ends")
    parser.add_argument("--silent", type=float, default=0.1, help="share of conversations without a reward")
    parser.add_argument("--delay-s", type=float, default=0.0, help="seconds from the last answer to the reward")
    parser.add_argument("--max-terms", type=int, default=8, help="longest sum")
    parser.add_argument("--patience-s", type=float, default=120.0, help="seconds to wait for the address")
    parser.add_argument("--every", type=int, default=200, help="conversations between two lines of output")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    users = Users(Client(options.address.rstrip("/"), options.patience_s), options)
    threads = [threading.Thread(target=users.run) for _ in range(options.users)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    print(json.dumps({**users.counts, "conversations": len(users.correct)}))


if __name__ == "__main__":
    main()
