"""An agent that answers questions with OpenAI's SDK and a search engine as its tool, and reports its own reward.

Searches are sent to your own server: a GET of `SEARCH_URL?q=WORDS` gives `{"results": [TEXT, ...]}`.
A row has `question`, and `answer` or a list of `answers`. The reward is 1 if the last line of the answer is one of
them, ignoring capitals, punctuation and articles, as in SQuAD's exact match.
"""

import json
import os
import re
import string
import urllib.parse
import urllib.request

from openai import BadRequestError, OpenAI

MAX_TURNS, MAX_RESULTS, MAX_CHARS = 8, 3, 2000
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Searches an encyclopedia, and returns passages.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}
SYSTEM = "Search until you know the answer. Then write it, in as few words as possible, as the last line."


def search(query):
    url = f"{os.environ['SEARCH_URL']}?{urllib.parse.urlencode({'q': query})}"
    with urllib.request.urlopen(url, timeout=30) as answer:
        results = json.load(answer)["results"]
    return "\n\n".join(one[:MAX_CHARS] for one in results[:MAX_RESULTS]) or "nothing found"


def result_of(call):
    """The result of a call for the policy, or its error."""
    try:
        return search(**json.loads(call.function.arguments))
    except OSError:
        raise  # the server's fault, not the policy's: the sample gets no reward, instead of a bad one
    except Exception as error:  # the policy wrote the call
        return f"Error: {type(error).__name__}: {error}"


def plain(text):
    words = "".join(" " if one in string.punctuation else one for one in text.lower()).split()
    return " ".join(word for word in words if word not in ("a", "an", "the"))


def reward_of(text, row):
    gold = row.get("answers") or row["answer"]
    last = re.split(r"\n", text.strip())[-1]
    return float(plain(last) in [plain(one) for one in ([gold] if isinstance(gold, str) else gold)])


def post(url, body):
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).close()


def main():
    row = json.loads(os.environ["AREAL_LIKE_ROW"])
    client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY
    messages, searches = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["question"]}], 0
    content = ""
    for _ in range(MAX_TURNS):
        try:
            answer = (
                client.chat.completions.create(model="policy", messages=messages, tools=[SEARCH]).choices[0].message
            )
        except BadRequestError as error:
            if error.code != "context_length_exceeded":
                raise
            break
        messages.append(answer.model_dump(exclude_none=True))
        content = answer.content or ""
        if not answer.tool_calls:
            break
        for call in answer.tool_calls:
            searches += 1
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result_of(call)})
    value = reward_of(content, row)
    post(os.environ["AREAL_LIKE_REWARD_URL"], {"reward": value, "components": {"correct": value, "searches": searches}})


if __name__ == "__main__":
    main()
