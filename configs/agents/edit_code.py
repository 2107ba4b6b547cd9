"""An agent that writes and repairs programs with OpenAI's SDK: it changes files through tools until it is done.

Its files are in a temporary folder, which is removed at the end. Programs run in the sandbox of scorer `code`, and
never in this process. At the end it submits the file, and the scorer runs the tests of the row on it.

A row has `prompt`, `tests` and, if there is code to repair, `files` by name. The policy sees the first of MBPP's tests
(`test_list`), because it has the name of the function. The submitted file is `solution.py`.
"""

import json
import os
import tempfile
import urllib.request
from pathlib import Path

from openai import BadRequestError, OpenAI

from services.reward.python_tool import python

SOLUTION, MAX_TURNS, MAX_CHARS, MAX_FILES = "solution.py", 24, 100_000, 64


def place(folder, path):
    """Path of a file. Raises ValueError outside the folder."""
    found = (folder / path).resolve()
    if not found.is_relative_to(folder) or found == folder:
        raise ValueError(f"{path} is not in the work folder")
    return found


def list_files(folder):
    return "\n".join(sorted(str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file()))


def read_file(folder, path):
    return place(folder, path).read_text()


def write_file(folder, path, content):
    if len(content) > MAX_CHARS or len(list(folder.rglob("*"))) >= MAX_FILES:
        raise ValueError(f"at most {MAX_CHARS} characters, in {MAX_FILES} files")
    file = place(folder, path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content)
    return f"{path} has {len(content.splitlines())} lines"


def replace_text(folder, path, old, new):
    text = read_file(folder, path)
    if text.count(old) != 1:
        raise ValueError(f"the old text is there {text.count(old)} times, and must be there once")
    return write_file(folder, path, text.replace(old, new))


def run_python(folder, code):
    return python(f"{read_file(folder, SOLUTION)}\n{code}")


def declared(function, description, **arguments):
    properties = {name: {"type": "string", "description": words} for name, words in arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {
        "type": "function",
        "function": {"name": function.__name__, "description": description, "parameters": parameters},
    }


PATH = "Path of the file, relative to the work folder"
FUNCTIONS = {one.__name__: one for one in (list_files, read_file, write_file, replace_text, run_python)}
TOOLS = [
    declared(list_files, "Lists the files."),
    declared(read_file, "Returns a file.", path=PATH),
    declared(write_file, "Writes a whole file.", path=PATH, content="All of it"),
    declared(
        replace_text, "Replaces a text that is in a file once.",
        path=PATH, old="The text as it is, line breaks and spaces included", new="The text in its place",
    ),
    declared(run_python, f"Runs {SOLUTION} and then your code; returns what they print.", code="As in print(f(3))"),
]  # fmt: skip


def result_of(folder, call):
    """The result of a call for the policy, or its error."""
    try:
        return str(FUNCTIONS[call.function.name](folder, **json.loads(call.function.arguments)))[:MAX_CHARS]
    except Exception as error:  # the policy wrote the call
        return f"Error: {type(error).__name__}: {error}"


def task_of(row):
    tests = row.get("test_list")
    return f"{row['prompt']}\nYour program should pass this test, and others:\n{tests[0]}" if tests else row["prompt"]


def post(url, body):
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        return json.load(answer)


def main():
    row = json.loads(os.environ["AREAL_LIKE_ROW"])
    client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        for path, content in {SOLUTION: "", **(row.get("files") or {})}.items():
            write_file(folder, path, content)
        messages = [
            {"role": "system", "content": f"You edit {SOLUTION} with the tools you have. Say when you are done."},
            {"role": "user", "content": task_of(row)},
        ]
        for _ in range(MAX_TURNS):
            try:
                chat = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
            except BadRequestError as error:
                if error.code != "context_length_exceeded":
                    raise
                break  # the file is judged in its current state
            answer = chat.choices[0].message
            messages.append(answer.model_dump(exclude_none=True))
            if not answer.tool_calls:
                break
            for call in answer.tool_calls:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result_of(folder, call)})
        post(os.environ["AREAL_LIKE_ANSWER_URL"], {"answer": read_file(folder, SOLUTION)})


if __name__ == "__main__":
    main()
