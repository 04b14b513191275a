"""Reads a run's TensorBoard file with the tensorboard package and compares it with metrics.jsonl.

    pip install tensorboard
    python tools/read_events.py runs/quickstart-0123456789ab ...

Every value must be there, at its step, rounded to the 32 bits that TensorBoard keeps.
"""
import json
import struct
import sys
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def rounded(value):
    """A value as TensorBoard keeps it; `inf` and `NaN` are texts in metrics.jsonl."""
    try:
        return struct.unpack("<f", struct.pack("<f", float(value)))[0]
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def expected(run):
    """All values of metrics.jsonl by TensorBoard's tag, in order."""
    tags = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        step, split = record.pop("step"), record.pop("split")
        record.pop("epoch")
        for name, value in record.items():
            tags.setdefault(f"{name}/{split}", []).append((step, rounded(value)))
    return tags


def found(run):
    """All scalars that TensorBoard sees."""
    events = EventAccumulator(str(run), size_guidance={"scalars": 0})
    events.Reload()
    scalars = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    return scalars


def same(a, b):
    return [step for step, _ in a] == [step for step, _ in b] and all(
        struct.pack("<f", x) == struct.pack("<f", y) for (_, x), (_, y) in zip(a, b)
    )


def main():
    failed = False
    for run in map(Path, sys.argv[1:]):
        ours, theirs = expected(run), found(run)
        wrong = sorted(tag for tag in ours.keys() | theirs.keys() if not same(ours.get(tag, []), theirs.get(tag, [])))
        values = sum(map(len, ours.values()))
        failed |= bool(wrong) or values == 0
        print(f"{run.name}: {len(ours)} tags, {values} values, " + (f"differ: {wrong}" if wrong else "all equal"))
    sys.exit(failed)


if __name__ == "__main__":
    main()
