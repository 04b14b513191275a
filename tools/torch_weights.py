"""ResNet-18 weights between Taper and PyTorch, both ways.

    python tools/torch_weights.py target/release/taper

Needs torch, numpy and safetensors. Trains two steps with Taper, loads the checkpoint into a PyTorch module of the same
architecture (`load_state_dict`, strict) and compares logits; then starts a Taper run from weights that PyTorch made. Logits are
compared by `taper replay`, which reads a record of weights, input and results.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from torch_nets import ResNet


RECIPE = """
data: {name: synthetic-images, batch_size: 32}
model: {name: resnet18}
optimizer: {name: sgdm, lr: 0.01}
train: {steps: 2}
"""


def taper(*args):
    return subprocess.run([sys.argv[1], *map(str, args)], check=True, text=True, stdout=subprocess.PIPE).stdout


def logits_agree(name, weights, folder):
    """PyTorch's logits for these weights against Taper's."""
    model = ResNet()
    model.load_state_dict(weights)  # strict: every name and shape
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(8, 3, 32, 32, generator=generator)
    record = {f"state.{k}": v.contiguous() for k, v in weights.items()}
    record |= {"input": images, "target": torch.zeros(8, dtype=torch.int64)}
    # A record's evaluation comes after one training pass, with the running statistics that it leaves.
    with torch.no_grad():
        record["train.logits"] = model.train()(images)
        record["eval.logits"] = model.eval()(images)
    config = {"num_blocks": [2, 2, 2, 2], "image": 32, "in_channels": 3, "num_classes": 10, "batch": 8}
    path = folder / f"{name}.safetensors"
    save_file(record, path, metadata={"model": "resnet", "config": json.dumps(config)})
    report = json.loads(taper("replay", path, "--json"))
    print(f"{name}: largest difference of logits {report['max_abs_error']:.1e} ({report['tensor']})")
    assert report["max_abs_error"] <= 1e-4, report


def main():
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "recipe.yaml").write_text(RECIPE)
        run = taper("train", folder / "recipe.yaml", "--runs", folder / "runs", "--quiet").strip()
        checkpoint = load_file(Path(run) / "checkpoints/step-2/model.safetensors")
        logits_agree("taper-to-pytorch", checkpoint, folder)

        made = folder / "made.safetensors"
        weights = ResNet().state_dict()
        save_file(weights, made)
        taper("train", folder / "recipe.yaml", "--runs", folder / "more", "--quiet", "--set", f"train.init_from={made}")
        logits_agree("pytorch-to-taper", weights, folder)


main()
