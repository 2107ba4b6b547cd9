"""Draws mutants: a module by the root of its size, then an operator it has, then a site; every mutant at most once."""

from __future__ import annotations

import difflib
import random
from collections import defaultdict
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from tests.mutation.operators import Mutant, is_real, mutants
from tests.mutation.targets import core_modules


@dataclass(frozen=True)
class Drawn:
    module: str
    mutant: Mutant
    source: bytes

    @property
    def place(self) -> str:
        return f"{self.module}:{self.mutant.line} {self.mutant.operator}"

    def mutated(self) -> bytes:
        return self.mutant.apply(self.source)

    def diff(self) -> list[str]:
        """Changed lines, without the header."""
        before, after = self.source.decode().splitlines(), self.mutated().decode().splitlines()
        return [
            line for line in difflib.unified_diff(before, after, n=0, lineterm="") if line[:2] not in ("--", "++", "@@")
        ]

    @property
    def key(self) -> str:
        """Names the mutant where lines have moved: module, operator and what is changed into what."""
        return f"{self.module} | {self.mutant.operator} | " + " ".join(" ".join(self.diff()).split())


class _Pool:
    """Mutants of one module by operator; found once the module is drawn."""

    def __init__(self, root: Path, module: str) -> None:
        self.module = module
        self.source = (root / module).read_bytes()
        self._by_operator: dict[str, list[Drawn]] | None = None

    def take(self, random_: random.Random) -> Drawn | None:
        """A real mutant that was not taken before; None where there is no other."""
        if self._by_operator is None:
            self._by_operator = defaultdict(list)
            for mutant in mutants(self.source):
                self._by_operator[mutant.operator].append(Drawn(self.module, mutant, self.source))
        while left := sorted(operator for operator, found in self._by_operator.items() if found):
            found = self._by_operator[random_.choice(left)]
            drawn = found.pop(random_.randrange(len(found)))
            if is_real(drawn.mutant, drawn.source):
                return drawn
        return None


def draw(root: Path, seed: int, number: int, only: str = "*") -> list[Drawn]:
    random_ = random.Random(seed)
    pools = [_Pool(root, module) for module in map(str, core_modules(root)) if fnmatch(module, only)]
    chosen: list[Drawn] = []
    while len(chosen) < number and pools:
        pool = random_.choices(pools, [len(pool.source) ** 0.5 for pool in pools])[0]
        drawn = pool.take(random_)
        if drawn is None:
            pools.remove(pool)
        else:
            chosen.append(drawn)
    return sorted(chosen, key=lambda drawn: (drawn.module, drawn.mutant.start))


def named(root: Path, places: list[str]) -> list[Drawn]:
    """Mutants of one operator on one line: FILE:LINE:OPERATOR; `*` for any operator."""
    chosen = []
    for place in places:
        module, line, operator = place.split(":")
        source = (root / module).read_bytes()
        chosen += [
            Drawn(module, mutant, source) for mutant in mutants(source)
            if mutant.line == int(line) and fnmatch(mutant.operator, operator) and is_real(mutant, source)
        ]  # fmt: skip
    return chosen
