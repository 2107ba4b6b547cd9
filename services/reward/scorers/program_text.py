"""Extracts the program from a model's answer: fenced blocks, and HumanEval's completions.

The program is not parsed: it is text until it is in a sandbox.
"""

from __future__ import annotations

PYTHON_TAGS = ("python", "python3", "py", "py3")
FENCES = ("```", "~~~")


def program_in(response: str, prompt: str = "", entry_point: str = "") -> str:
    """The program in an answer; empty if there is none.

    It is the last fenced block marked as Python, else the last one without a mark, else the whole answer. With
    HumanEval's `prompt` it is appended to the prompt if it only continues it, and to the prompt's imports and helpers
    if it defines `entry_point` itself.
    """
    block = _last_block(response)
    text = response if block is None else block
    if not text.strip():
        return ""
    if not prompt or not entry_point:
        return text
    if _defines(text, entry_point):
        return f"{_before_definition(prompt, entry_point)}\n{text}"
    return prompt + _indented(text)


def _last_block(response: str) -> str | None:
    """The last block of Python, or of no stated language. An unclosed one extends to the end of the answer."""
    marked: str | None = None
    unmarked: str | None = None
    fence, tag, lines = "", "", list[str]()
    for line in [*response.split("\n"), None]:
        stripped = line.strip() if line is not None else ""
        if fence:
            if line is not None and not (stripped.startswith(fence) and not stripped.strip(fence[0])):
                lines.append(line)
                continue
            if tag in PYTHON_TAGS:
                marked = "\n".join(lines)
            elif not tag:
                unmarked = "\n".join(lines)
            fence = ""
        elif stripped.startswith(FENCES):
            rest = stripped.lstrip(stripped[0])
            fence = stripped[: len(stripped) - len(rest)]
            rest = rest.strip().lower()
            tag, lines = (rest.split() or [""])[0].strip("{}."), []
    return unmarked if marked is None else marked


def _defines(text: str, name: str) -> bool:
    starts = (f"def {name}(", f"def {name} (", f"async def {name}(", f"def {name}[", f"class {name}", f"{name} =")
    return any(line.startswith(starts) for line in text.split("\n"))


def _before_definition(prompt: str, entry_point: str) -> str:
    """Imports and helpers of a prompt, without its unfinished function."""
    lines = prompt.split("\n")
    places = [number for number, line in enumerate(lines) if line.startswith(f"def {entry_point}")]
    return "\n".join(lines[: places[-1]]) if places else prompt


def _indented(completion: str) -> str:
    """Restore the indentation of a completion's first line, which many samplers strip."""
    first = completion.lstrip("\n")
    return completion if first[:1].isspace() else f"    {first}"
