"""Reads tracked runs back with MLflow's own client and compares them with their folders.

    pip install mlflow
    python tools/read_mlflow.py http://127.0.0.1:5000 runs [EXPERIMENT]

Every value of metrics.jsonl must be there once, at its step, to the bit; so must the settings, the status, the files, and one run
around the runs of one name. Times must not run backwards.
"""
import json
import math
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
from mlflow.tracking import MlflowClient

STATUS = {"finished": "FINISHED", "diverged": "FAILED", "interrupted": "KILLED"}


def expected(run):
    """All values of metrics.jsonl by MLflow's key."""
    found = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        step, split = record.pop("step"), record.pop("split")
        record.pop("epoch")
        for name, value in record.items():
            found.setdefault(f"{split}/{name}", []).append((step, float(value)))
    # The same value at the same step is one value to MLflow.
    return {key: sorted(set(map(repr, values))) for key, values in found.items()}


def main():
    address, runs = sys.argv[1], Path(sys.argv[2])
    experiment = sys.argv[3] if len(sys.argv) > 3 else "taper"
    client = MlflowClient(address)
    ids = [client.get_experiment_by_name(experiment).experiment_id]
    faults, names = [], {}
    for run in sorted(path.parent for path in runs.glob("*/recipe.yaml")):
        summary = json.loads((run / "summary.json").read_text())
        found = client.search_runs(ids, f"tags.`taper.id` = '{summary['id']}'")
        if len(found) != 1:
            faults.append(f"{run.name}: {len(found)} runs")
            continue
        remote = found[0]
        names.setdefault(summary["name"], []).append(remote)
        ours, theirs, last = expected(run), {}, -math.inf
        for key in remote.data.metrics:
            history = client.get_metric_history(remote.info.run_id, key)
            theirs[key] = sorted(map(repr, [(m.step, m.value) for m in history]))
            times = [m.timestamp for m in sorted(history, key=lambda m: m.step)]
            if times != sorted(times):
                faults.append(f"{run.name}: {key}: times run backwards")
        for key in sorted(ours.keys() | theirs.keys()):
            if ours.get(key) != theirs.get(key):
                faults.append(f"{run.name}: {key}: {ours.get(key)} is {theirs.get(key)}")
        if remote.info.status != STATUS[summary["status"]]:
            faults.append(f"{run.name}: {remote.info.status} of {summary['status']}")
        if remote.data.params.get("optimizer.name") is None or "train.epochs" not in remote.data.params:
            faults.append(f"{run.name}: settings: {remote.data.params}")
        with tempfile.TemporaryDirectory() as place:
            for name in ["recipe.yaml", "metrics.jsonl", "summary.json"]:
                path = client.download_artifacts(remote.info.run_id, name, place)
                if Path(path).read_bytes() != (run / name).read_bytes():
                    faults.append(f"{run.name}: {name} is another file")
        print(f"{run.name}: {len(ours)} metrics, {sum(map(len, ours.values()))} values, {len(remote.data.params)} settings")
    for name, remotes in names.items():
        if len(remotes) > 1:
            parents = {remote.data.tags.get("mlflow.parentRunId") for remote in remotes}
            found = client.search_runs(ids, f"tags.`taper.sweep` = '{name}'")
            if len(found) != 1 or parents != {found[0].info.run_id}:
                faults.append(f"{name}: not inside one run: {parents}")
    for fault in faults:
        print(f"error: {fault}")
    sys.exit(bool(faults) or not names)


if __name__ == "__main__":
    main()
