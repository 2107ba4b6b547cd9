"""Output of `areal-like verify`, and its exit status: 0 everything holds, 1 something differs."""

from __future__ import annotations

import json

from controller.run_folder.formatting import printable
from controller.run_folder.run_folder import RunFolder
from controller.runs.verify.target import find_target
from controller.runs.verify.verify import Verified, verify

MAX_SHOWN = 20


def verify_command(text: str, *, run: str, invariant: str | None, num_spots: int, seed: int, as_json: bool) -> int:
    """Verify a run or an exported model, print the result and return the exit status. Raises UserError."""
    target = find_target(text, run)
    found = verify(target.run, invariant=invariant, export=target.export, checkpoint=target.checkpoint)
    try:
        if num_spots:
            from controller.runs.verify.spot_check import spot_check

            spots = spot_check(target.run, num_spots, seed)
            found.findings += spots.findings
            found.counts += spots.lines
    finally:  # an error of the spot checks does not hide what was found before
        _show(target.run, found, as_json=as_json)
    return 1 if found.findings else 0


def _show(run: RunFolder, found: Verified, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(_as_json(str(run.root), found), ensure_ascii=False))
    else:
        _print(run.name, found)


def _as_json(root: str, found: Verified) -> dict[str, object]:
    return {
        "run": root, "is_clean": not found.findings, "findings": found.findings, "notes": found.notes,
        "counts": found.counts, "policy_digest": found.policy_digest, "last_digest": found.last_digest,
    }  # fmt: skip


def _print(name: str, found: Verified) -> None:
    for line in found.counts:
        print(printable(line))
    for line in found.notes:
        print(printable(f"note: {line}"))
    if found.policy_digest:
        print(f"policy digest: {found.policy_digest}")
    if not found.findings:
        print(printable(f"{name}: all checks passed"))
        return
    print(printable(f"first difference: {found.findings[0]}"))
    for line in found.findings[1:MAX_SHOWN]:
        print(printable(f"  also: {line}"))
    if len(found.findings) > MAX_SHOWN:
        print(f"  and {len(found.findings) - MAX_SHOWN} more")
