"""Reads what `taper track --to wandb-offline --out FOLDER` wrote with the wandb package and compares it with the runs.

    pip install wandb==0.25.0        # later ones have no reader in Python
    python tools/read_wandb.py FOLDER runs/quickstart-0123456789ab ...

Every value must be there, once and at its step, with its time; the settings, the group and the outcome too.
"""
import json
import math
import os
import sys
from pathlib import Path

# It would tell its makers of what goes wrong.
os.environ["WANDB_ERROR_REPORTING"] = "false"
import wandb
import yaml

# The reader is for the package's own process.
wandb._assert_is_internal_process = True
from wandb.proto import wandb_internal_pb2  # noqa: E402
from wandb.sdk.internal.datastore import DataStore  # noqa: E402


def records(path):
    """All messages of a file, by their kind."""
    store = DataStore()
    store.open_for_scan(str(path))
    while (data := store.scan_data()) is not None:
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        yield record.num, kind, getattr(record, kind)


def items(entries):
    return {entry.key: json.loads(entry.value_json) for entry in entries}


def number(value):
    """A value that can be compared; `inf` and `NaN` are texts in metrics.jsonl."""
    value = float(value)
    return "NaN" if math.isnan(value) else value


def plain(value):
    """A setting without what is null, and numbers as numbers."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    try:
        return float(value) if not isinstance(value, bool) else value
    except (TypeError, ValueError):
        return value


def expected(run):
    """All values of metrics.jsonl, by step."""
    steps = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        step, split, epoch = record.pop("step"), record.pop("split"), record.pop("epoch")
        row = steps.setdefault(step, {})
        row["epoch"] = number(epoch)
        row.update({f"{split}/{name}": number(value) for name, value in record.items()})
    return list(steps.items())


def wrong(folder, run):
    """What is wrong with a run's folder."""
    name, id = run.name.rsplit("-", 1)
    found = list(folder.glob(f"offline-run-????????_??????-{id}/run-{id}.wandb"))
    if len(found) != 1:
        return [f"{len(found)} files of it"]
    all = list(records(found[0]))
    out = []
    if [num for num, _, _ in all] != list(range(1, len(all) + 1)):
        out.append("records are not numbered in order")
    summary = json.loads((run / "summary.json").read_text())
    kinds = [kind for _, kind, _ in all]
    if kinds[:2] != ["header", "run"] or kinds[-4:] != ["summary", "exit", "final", "footer"] or set(kinds[2:-4]) != {"history"}:
        out.append(f"not the records of a run that has ended: {kinds[:3]} … {kinds[-4:]}")
        return out
    about = all[1][2]
    if (about.run_id, about.run_group, about.display_name) != (id, name, run.name):
        out.append(f"its names are {about.run_id}, {about.run_group}, {about.display_name}")
    settings, recipe = items(about.config.update), yaml.safe_load((run / "recipe.yaml").read_text())
    # What is null is no setting; a float without a point is a text to this reader of YAML.
    different = [key for key in recipe if plain(recipe[key]) != plain(settings.get(key))]
    if different or settings["seed"] != recipe["seed"]:
        out.append(f"its settings {different} are others")
    rows, times, last = [], [about.start_time.ToNanoseconds() / 1e9], {}
    for _, _, row in all[2:-4]:
        values = items(row.item)
        last.update(values)
        step, time, runtime = values.pop("_step"), values.pop("_timestamp"), values.pop("_runtime")
        if step != row.step.num or abs(time - runtime - times[0]) > 1e-3:
            out.append(f"step {step}, {row.step.num}: {time}, {runtime}")
        times.append(time)
        rows.append((step, {key: number(value) for key, value in values.items()}))
    if rows != expected(run):
        out.append("its values are not those of metrics.jsonl")
    if times != sorted(times) or times[-1] > (run / "timing.jsonl").stat().st_mtime + 1:
        out.append("times run backwards, or ahead")
    if str(items(all[-4][2].update)) != str(dict(sorted({**last, "status": summary["status"]}.items()))):
        out.append("its summary is not its last values")
    if all[-3][2].exit_code != {"finished": 0, "diverged": 1}[summary["status"]]:
        out.append(f"its exit code is {all[-3][2].exit_code}")
    return out


def main():
    folder, runs = Path(sys.argv[1]), [Path(run) for run in sys.argv[2:]]
    bad = [f"{run.name}: {what}" for run in runs for what in wrong(folder, run)]
    print("\n".join(bad) or f"{len(runs)} runs: all is there")
    sys.exit(bool(bad))


main()
