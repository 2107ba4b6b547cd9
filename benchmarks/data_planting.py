"""Plants faults of ten kinds in rows of GSM8K and MATH, for data_faults.py.

Each fault replaces one row. Which rows, and how each fault is written, follows from the seed.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controller.preflight.dataset.text import numbers

Row = dict[str, Any]
KINDS = (
    "schema", "length", "language", "exact_duplicates", "near_duplicates", "unparseable_answer", "solution_disagrees",
    "contamination", "secrets", "personal_data",
)  # fmt: skip
"""Kinds of faults, each with the name of the stage that must find it."""
MIN_WORDS = 20
"""Prompts that are reworded, embedded or cut have at least this many words."""


@dataclass(frozen=True)
class Planted:
    """Lines of a file, and the kind of fault by line number (from 1)."""

    lines: list[bytes]
    kinds: dict[int, str]


def read_gsm8k(folder: Path, split: str) -> list[Row]:
    """Rows `problem`, `solution`, `answer` of train.jsonl or test.jsonl with the published columns."""
    rows = [json.loads(line) for line in (folder / f"{split}.jsonl").open()]
    return [
        {"problem": row["question"], "solution": row["answer"], "answer": row["answer"].rpartition("####")[2].strip()}
        for row in rows
    ]


def read_math(folder: Path, split: str) -> list[Row]:
    """Rows `problem`, `solution`, `answer` of math_train.jsonl or math_test.jsonl (also with .gz)."""
    plain = folder / f"math_{split}.jsonl"
    with plain.open("rb") if plain.is_file() else gzip.open(f"{plain}.gz", "rb") as lines:
        rows = [json.loads(line) for line in lines]
    return [{name: row[name] for name in ("problem", "solution", "answer")} for row in rows]


def plant(rows: Sequence[Row], eval_rows: Sequence[Row], num_each: int, seed: int) -> Planted:
    """Shuffle the rows, and replace `num_each` of them by a fault of each kind."""
    rng = random.Random(f"faults/{seed}")
    rows = rng.sample(list(rows), len(rows))
    places = rng.sample(range(len(rows) // 4, len(rows)), num_each * len(KINDS))
    kinds = {place: KINDS[number % len(KINDS)] for number, place in enumerate(places)}
    originals = [place for place in range(len(rows)) if place not in kinds]
    leaked = rng.sample([row for row in eval_rows if _is_long(row)], num_each)
    lines = []
    for place, row in enumerate(rows):
        kind = kinds.get(place)
        if kind is None:
            lines.append(_line(row))
        elif kind in ("exact_duplicates", "near_duplicates"):
            lines.append(_line(_duplicate(kind, rows, originals, place, rng)))
        elif kind == "contamination":
            lines.append(_line(_contaminated(leaked.pop(), rng)))
        elif kind == "schema":
            lines.append(_broken(row, rng))
        else:
            lines.append(_line(_IN_PLACE[kind](dict(row), rows, rng)))
    return Planted(lines, {place + 1: kind for place, kind in kinds.items()})


def _line(row: Row) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass")


# ---------------------------------------------------------------- schema


def _broken(row: Row, rng: random.Random) -> bytes:
    row = dict(row)
    text, middle = row["problem"], len(row["problem"]) // 2
    way = rng.randrange(12)
    if way == 0:
        row["problem"] = rng.choice(["", "  \n"])
    elif way == 1:
        del row["problem"]
    elif way == 2:
        row["problem"] = rng.choice([17, None, {"text": text}, True])
    elif way == 3:
        del row["answer"]
    elif way == 4:
        row["answer"] = rng.choice(["", None, [], {"value": 3}])
    elif way == 5:
        row["problem"] = text[:middle] + "\ufffd" + text[middle + 1 :]
    elif way == 6:
        quoted = text[:middle] + rng.choice(["’", "“", "é", "ü", "–", "×"]) + text[middle:]
        row["problem"] = quoted.encode().decode("cp1252", "replace").replace("\ufffd", "\u009d")
    elif way == 7:
        row["problem"] = text[:middle] + rng.choice("\x00\x01\x07\x08\x0c\x1b") + text[middle:]
    elif way == 8:
        row["solution"] += rng.choice(
            [" so $\\frac{1}{2", " \\begin{align*} x &= 1", " hence $\\sqrt{2}", " \\text{if} }"]
        )
    elif way == 9:
        return _line(row)[: rng.randrange(20, 60)]
    elif way == 10:
        line = _line(row)
        return line[:20] + rng.choice([b"\xff", b"\xe9", b"\xc3\x28"]) + line[20:]
    else:
        return rng.choice([b"[1, 2]", b'"text"', b"not a row at all", b"{'problem': 'single quotes'}"])
    return _line(row)


# ---------------------------------------------------------------- duplicates and contamination

_SYNONYMS = {
    "find": "determine", "determine": "find", "compute": "calculate", "total": "overall", "buys": "purchases",
    "many": "much", "needs": "requires", "gives": "hands", "also": "additionally", "each": "every", "if": "when",
    "number": "amount", "smallest": "least", "largest": "greatest", "has": "owns", "let": "suppose", "wants": "wishes",
    "bought": "purchased", "makes": "produces", "costs": "is priced at", "started": "began", "day": "weekday",
}  # fmt: skip


def _reworded(text: str, rng: random.Random) -> str:
    """The text with one or two words replaced, misspelt, left out or inserted; numbers and formulas stay."""
    words = text.split(" ")
    for _ in range(rng.choice([1, 2])):
        plain = [i for i, word in enumerate(words) if word.isalpha() and len(word) > 1 and not numbers([word.lower()])]
        known = [i for i in plain if words[i].lower() in _SYNONYMS]
        place, way = rng.choice(plain), rng.randrange(4)
        if way == 0 and known:
            place = rng.choice(known)
            words[place] = _SYNONYMS[words[place].lower()]
        elif way == 1:
            word, cut = words[place], rng.randrange(len(words[place]))
            words[place] = word[:cut] + word[cut + 1 :]
        elif way == 2:
            words.insert(place, rng.choice(["then", "now", "exactly", "just", "indeed", "please"]))
        else:
            words[place] = rng.choice(["the", "this", "that", "some", "her", "their"])
    return " ".join(words)


def _is_long(row: Row) -> bool:
    return (
        len([word for word in row["problem"].split() if word.isalpha()]) >= MIN_WORDS and "[asy]" not in row["problem"]
    )


def _duplicate(kind: str, rows: Sequence[Row], originals: Sequence[int], place: int, rng: random.Random) -> Row:
    while True:
        earlier = rng.choice(originals)
        row = rows[earlier]
        if earlier < place and (kind == "exact_duplicates" or _is_long(row)):
            break
    text = row["problem"]
    if kind == "near_duplicates":
        return {**row, "problem": _reworded(text, rng)}
    way = rng.randrange(4)
    changed = [text, text + "\n", text.replace(" ", "  "), text.rstrip(".?")][way]
    return {**row, "problem": changed if way else (text.upper() if "\\" not in text else text)}


_BEFORE = (
    "Solve the following problem step by step.",
    "Question from last week's homework:",
    "Here is a puzzle for you.",
)
_AFTER = ("Explain every step.", "Show your work and box the result.", "Take your time; accuracy matters most.")


def _contaminated(row: Row, rng: random.Random) -> Row:
    text = row["problem"]
    way = rng.randrange(5)
    if way == 1:
        text = text.upper() if "\\" not in text else "  ".join(text.split())
    elif way == 2:
        text = f"{rng.choice(_BEFORE)} {text} {rng.choice(_AFTER)}"
    elif way == 3:
        words = text.split(" ")
        ends = range(max(15, int(0.7 * len(words))), len(words) + 1)  # not within a formula
        text = next(cut for end in ends if (cut := " ".join(words[:end])).count("$") % 2 == 0 or end == len(words))
    elif way == 4:
        text = _reworded(text, rng)
    return {**row, "problem": text}


# ---------------------------------------------------------------- faults of one row

_FOREIGN = {
    "de": ("Ein Bauer hat {a} Kühe und kauft noch {b} dazu. Wie viele Kühe hat er jetzt insgesamt?",
           "Berechne die Summe der Zahlen {a} und {b} und erkläre deinen Rechenweg.",
           "In einer Klasse sind {a} Kinder, davon tragen {b} eine Brille. Wie viele tragen keine?"),
    "fr": ("Un magasin vend {a} livres le matin et {b} livres le soir. Combien de livres a-t-il vendus ce jour-là?",
           "Trouvez le plus grand commun diviseur de {a} et {b}, puis justifiez votre réponse.",
           "Marie possède {a} billes et en donne {b} à son frère. Combien lui en reste-t-il?"),
    "es": ("Un tren recorre {a} kilómetros en {b} horas. ¿Cuál es su velocidad media?",
           "Halla todos los números enteros entre {a} y {b} que son divisibles por tres.",
           "Pedro compró {a} manzanas y comió {b} de ellas. ¿Cuántas manzanas le quedan?"),
    "it": ("Una scatola contiene {a} palline rosse e {b} palline blu. Qual è il numero totale di palline?",
           "Calcola il prodotto di {a} e {b} e scrivi il risultato come numero intero."),
    "pt": ("Uma loja tem {a} camisas e vendeu {b} delas durante a semana. Quantas camisas ainda restam na loja?",
           "Determine o valor de x sabendo que a soma dos ângulos é {a} e que um deles mede {b} graus."),
    "ru": ("В корзине лежит {a} яблок, из них {b} зелёные. Сколько в корзине красных яблок?",
           "Найдите сумму всех делителей числа {a}, которые больше чем {b}."),
    "zh": ("小明有{a}个苹果，他又买了{b}个苹果，请问他现在一共有多少个苹果？请写出详细的解题步骤。",
           "一个长方形的长是{a}厘米，宽是{b}厘米，求这个长方形的面积和周长分别是多少？"),
    "pl": ("W sklepie było {a} zeszytów, sprzedano {b} z nich. Ile zeszytów pozostało w sklepie?",),
    "tr": ("Bir çiftlikte {a} koyun ve {b} inek vardır. Bu çiftlikte toplam kaç hayvan bulunmaktadır?",),
}  # fmt: skip


def _foreign(row: Row, _rows: Sequence[Row], rng: random.Random) -> Row:
    text = rng.choice(_FOREIGN[rng.choice(list(_FOREIGN))])
    row["problem"] = text.format(a=rng.randrange(100, 9999), b=rng.randrange(10, 99))
    return row


def _wrong_length(row: Row, _rows: Sequence[Row], rng: random.Random) -> Row:
    text = row["problem"]
    if rng.random() < 0.5:
        row["problem"] = text[: rng.randrange(1, 9)].strip() or "x"
    else:
        row["problem"] = " ".join([text] * (rng.randrange(11_000, 30_000) // len(text) + 1))
    return row


_NO_ANSWERS = (
    "N/A", "see solution", "see above", "TODO", "unknown", "I don't know", "?", "12?", "error: timed out", "null",
    "...",
    "The answer depends on how the reader understands the second sentence", "As shown in the figure", "\\frac{1}{",
    "Both of them have the same number of apples at the end of the week", "answers may vary", "\\sqrt{", "= =",
)  # fmt: skip


def _unparseable(row: Row, _rows: Sequence[Row], rng: random.Random) -> Row:
    answer = row["answer"]
    opened = [found.end() for found in re.finditer(r"\{", answer)]
    row["answer"] = answer[: rng.choice(opened)] if opened and rng.random() < 0.7 else rng.choice(_NO_ANSWERS)
    return row


def _disagreeing(row: Row, rows: Sequence[Row], rng: random.Random) -> Row:
    answer = row["answer"].replace(",", "")
    if re.fullmatch(r"-?\d+", answer):
        other = str(int(answer) + rng.choice([-10, -2, -1, 1, 2, 9, 10, 100]))
    else:
        other = answer
        while re.sub(r"\W", "", other) == re.sub(r"\W", "", answer) or not other:
            other = rng.choice(rows)["answer"]
    if "####" in row["solution"] and rng.random() < 0.5:
        row["solution"] = f"{row['solution'].rpartition('####')[0]}#### {other}"
    else:
        row["answer"] = other
    return row


def _random(rng: random.Random, count: int, signs: str = string.ascii_letters + string.digits) -> str:
    return "".join(rng.choices(signs, k=count))


def _secret(rng: random.Random) -> str:
    upper = string.ascii_uppercase + string.digits
    ways: Sequence[Callable[[], str]] = (
        lambda: "AKIA" + _random(rng, 16, upper),
        lambda: "ghp_" + _random(rng, 36),
        lambda: "sk-" + _random(rng, 20) + "T3BlbkFJ" + _random(rng, 20),
        lambda: (
            "xoxb-" + _random(rng, 12, string.digits) + "-" + _random(rng, 12, string.digits) + "-" + _random(rng, 24)
        ),
        lambda: "sk_live_" + _random(rng, 24),
        lambda: "glpat-" + _random(rng, 20),
        lambda: "hf_" + _random(rng, 34),
        lambda: "AIza" + _random(rng, 35),
        lambda: "sk-ant-api03-" + _random(rng, 60),
        lambda: "-----BEGIN RSA PRIVATE " + "KEY-----\n" + _random(rng, 64),
        lambda: "postgres://admin:" + _random(rng, 10) + "@db.internal:5432/app",
        lambda: "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0." + _random(rng, 43),
    )
    return rng.choice(ways)()


def _with_secret(row: Row, _rows: Sequence[Row], rng: random.Random) -> Row:
    form = rng.choice(["API_KEY={}", "Authorization: Bearer {}", "the key is {} for now", "token: '{}'"])
    return _with_text(row, form.format(_secret(rng)), rng)


def _with_text(row: Row, text: str, rng: random.Random) -> Row:
    """The row with a text before or after the prompt, or before the solution."""
    if rng.random() < 0.4:
        row["solution"] = f"{text}\n{row['solution']}"
    else:
        row["problem"] = f"{row['problem']}\n{text}" if rng.random() < 0.5 else f"{text}\n{row['problem']}"
    return row


def _card_number(rng: random.Random) -> str:
    start = rng.choice(["4", "51", "55", "37"])
    body = start + _random(rng, (14 if start == "37" else 15) - len(start), string.digits)
    total = sum(
        sum(divmod(int(digit) * (2 if place % 2 == 0 else 1), 10)) for place, digit in enumerate(reversed(body))
    )
    number = body + str(-total % 10)
    return number if rng.random() < 0.5 or len(number) != 16 else " ".join(number[i : i + 4] for i in range(0, 16, 4))


def _account(rng: random.Random) -> str:
    country, form = rng.choice(
        [("DE", "d" * 18), ("FR", "d" * 23), ("GB", "uuuu" + "d" * 14), ("NL", "uuuu" + "d" * 10)]
    )
    body = "".join(rng.choice(string.digits if sign == "d" else string.ascii_uppercase) for sign in form)
    check = 98 - int("".join(str(int(sign, 36)) for sign in f"{body}{country}00")) % 97
    number = f"{country}{check:02}{body}"
    return number if rng.random() < 0.5 else " ".join(number[i : i + 4] for i in range(0, len(number), 4))


def _phone(rng: random.Random) -> str:
    four = rng.randrange(1000, 9999)
    return rng.choice(
        [
            f"+1 212-{rng.randrange(220, 899)}-{four}", f"(415) {rng.randrange(220, 899)}-{four}",
            f"312.{rng.randrange(220, 899)}.{four}", f"+49 30 {rng.randrange(20000, 99999)}{rng.randrange(10, 99)}",
            f"+44 20 7{rng.randrange(100, 999)} {four}", f"+33 6 {rng.randrange(10, 99)} 34 {rng.randrange(10, 99)} 78",
        ]
    )  # fmt: skip


def _with_person(row: Row, _rows: Sequence[Row], rng: random.Random) -> Row:
    name = rng.choice(["anna.schmidt", "j.doe", "maria_lopez", "wei.zhang88", "tom+school"])
    found = rng.choice(
        [
            f"{name}@{rng.choice(['gmail.com', 'web.de', 'uni-bonn.de', 'mail.example.org'])}", _phone(rng),
            _account(rng), _card_number(rng),
        ]
    )  # fmt: skip
    return _with_text(
        row, rng.choice(["Contact: {}.", "Please write to {} about it.", "paid by {}"]).format(found), rng
    )


_IN_PLACE: dict[str, Callable[[Row, Sequence[Row], random.Random], Row]] = {
    "length": _wrong_length,
    "language": _foreign,
    "unparseable_answer": _unparseable,
    "solution_disagrees": _disagreeing,
    "secrets": _with_secret,
    "personal_data": _with_person,
}


def with_other_numbers(row: Row, turn: int) -> Row:
    """The row with `turn` added to every number of its prompt, so that it is no duplicate; for measurements of time."""
    if not turn:
        return row
    text = re.sub(r"\d+", lambda found: str(int(found[0][:15]) + turn), row["problem"])
    return {**row, "problem": f"{text} (Version {turn}.)"}
