"""Reads a run's TensorBoard file with the tensorboard package and compares it with metrics.jsonl.

    pip install tensorboard
    python tools/read_events.py [--tracked FOLDER] runs/quickstart-0123456789ab ...

Every value must be there, at its step, rounded to the 32 bits that TensorBoard keeps. With --tracked the file is the one that
`taper track --to tensorboard --out FOLDER` made, and has more: true times, histograms of the weights and of what was probed, and the
settings in the HParams plugin.
"""
import time
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


def more(folder, run):
    """What is wrong with what a tracked file has more."""
    from tensorboard.plugins.hparams import metadata, plugin_data_pb2

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0, "tensors": 0})
    events.Reload()
    wrong = []
    times = [(e.step, e.wall_time) for tag in events.Tags()["scalars"] for e in events.Scalars(tag)]
    changed = (run / "timing.jsonl").stat().st_mtime
    if not all(changed - 86400 < at <= time.time() for _, at in times):
        wrong.append("times that are none")
    if [at for _, at in sorted(times)] != sorted(at for _, at in times):
        wrong.append("times that run backwards")
    histograms = events.Tags()["histograms"]
    for tag in histograms:
        for event in events.Histograms(tag):
            value = event.histogram_value
            if abs(sum(value.bucket) - value.num) > 1e-6 or value.min > value.max:
                wrong.append(f"histogram {tag}")
    probed = any(tag.endswith("/probe") for tag in events.Tags()["scalars"])
    if not any(tag.startswith("weights/") for tag in histograms) or probed and not any(tag.startswith("v/") for tag in histograms):
        wrong.append(f"histograms: {histograms}")
    plugin = events.PluginTagToContent(metadata.PLUGIN_NAME)
    start = plugin_data_pb2.HParamsPluginData.FromString(plugin[metadata.SESSION_START_INFO_TAG]).session_start_info
    end = plugin_data_pb2.HParamsPluginData.FromString(plugin[metadata.SESSION_END_INFO_TAG]).session_end_info
    if start.hparams["optimizer.lr"].number_value <= 0 or not start.hparams["optimizer.name"].string_value:
        wrong.append(f"settings: {start}")
    if end.status != 1 or not 0 < start.start_time_secs <= end.end_time_secs:
        wrong.append(f"the end: {end}")
    return wrong


def same(a, b):
    return [step for step, _ in a] == [step for step, _ in b] and all(
        struct.pack("<f", x) == struct.pack("<f", y) for (_, x), (_, y) in zip(a, b)
    )


def main():
    failed, args, tracked = False, sys.argv[1:], None
    if args[:1] == ["--tracked"]:
        tracked, args = Path(args[1]), args[2:]
    for run in map(Path, args):
        folder = tracked / run.name if tracked else run
        ours, theirs = expected(run), found(folder)
        wrong = sorted(tag for tag in ours.keys() | theirs.keys() if not same(ours.get(tag, []), theirs.get(tag, [])))
        wrong += more(folder, run) if tracked else []
        values = sum(map(len, ours.values()))
        failed |= bool(wrong) or values == 0
        print(f"{run.name}: {len(ours)} tags, {values} values, " + (f"differ: {wrong}" if wrong else "all equal"))
    sys.exit(failed)


if __name__ == "__main__":
    main()
