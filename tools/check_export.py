"""Checks exported networks with the programs they were written for.

    python tools/check_export.py FOLDER

FOLDER holds net.py, net.safetensors, net.onnx and record.safetensors: an input and what Taper made of it (`input`, `logits`; of a
language model with a state `tokens` in two windows and the `logits` of both; of one without `tokens` and `logits`, and `targets` with
their `loss` and the `ignored` one, which does not count). The module is loaded strictly by PyTorch; the graph is checked by
`onnx` and computed by `onnxruntime`. Prints a JSON object a program: what is missing, or the largest difference to Taper's logits.
"""

import importlib.util
import json
import sys
from pathlib import Path


def torch_logits(folder, record, read):
    import torch

    net = read("net").load()
    with torch.no_grad():
        if "tokens" not in record:
            return [net(record["input"]).numpy()]
        if "more" not in record:
            logits, loss = net(record["tokens"], record["targets"])
            return [logits.numpy(), loss.numpy()]
        first, states = net(record["tokens"])
        second, _ = net(record["more"], states)
        return [first.numpy(), second.numpy()]


def onnx_logits(folder, record, _):
    import numpy as np
    import onnx
    import onnxruntime

    path = str(folder / "net.onnx")
    onnx.checker.check_model(onnx.load(path), full_check=True)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    record = {name: tensor.numpy() for name, tensor in record.items()}
    if "tokens" not in record:
        return session.run(["logits"], {"images": record["input"]})
    if "more" not in record:
        (logits,) = session.run(["logits"], {"tokens": record["tokens"]})
        # The graph has no loss: it is computed from its logits here.
        targets = record["targets"]
        sums = np.log(np.exp(logits.astype(np.float64)).sum(-1))
        right = np.take_along_axis(logits, np.maximum(targets, 0)[..., None], -1)[..., 0]
        return [logits, np.array((sums - right)[targets != record["ignored"]].mean(), np.float32)]
    batch = record["tokens"].shape[1]
    states = {
        value.name: np.zeros([1, batch, value.shape[2]], np.float32)
        for value in session.get_inputs()
        if value.name != "tokens"
    }
    found = []
    for tokens in (record["tokens"], record["more"]):
        logits, *after = session.run(None, {"tokens": tokens, **states})
        states = {name: value for name, value in zip(states, after)}
        found.append(logits)
    return found


def main():
    folder = Path(sys.argv[1])

    def module(name):
        spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    for program, logits in (("pytorch", torch_logits), ("onnx", onnx_logits)):
        try:
            # The generated file has the reader of safetensors.
            record = module("net").read(folder / "record.safetensors")
            expected = [record[name].numpy() for name in ("logits", "more_logits", "loss") if name in record]
            found = logits(folder, record, module)
        except ImportError as e:
            print(json.dumps({"program": program, "missing": str(e)}))
            continue
        assert len(found) == len(expected)
        assert all(f.shape == e.shape for f, e in zip(found, expected)), [f.shape for f in found]
        difference = max(float(abs(f - e).max()) for f, e in zip(found, expected))
        largest = max(float(abs(e).max()) for e in expected)
        print(json.dumps({"program": program, "difference": difference, "largest": largest}))


main()
