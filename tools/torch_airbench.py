"""Records of airbench94's network by PyTorch, for `taper replay` and the tests of taper-models.

    python tools/torch_airbench.py FOLDER

Needs torch, numpy and safetensors. Writes `airbench_<widths>.safetensors` with the weights, a batch and what PyTorch makes of it in
float64, rounded to float32: logits, loss and gradients of a training pass, the running statistics after it, and an evaluation; and
`whitening.safetensors` with images and their whitening filters in float64. Weights are not those of a start: biases, statistics and
filters are moved away from zero and one, so that none of them can be left out.
"""

import copy
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from torch_nets import Airbench


def images(count, size, seed):
    """Smooth pictures, as photographs are: noise plus the same noise blurred."""
    noise = torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (noise * 0.3 + 3 * F.avg_pool2d(noise, 5, 1, 2)).float().double()


def state(net):
    """Without the scales, which are no parameters of ours."""
    return {name: t for name, t in net.state_dict().items() if ".norm" not in name or not name.endswith(".weight")}


def rounded(tensors):
    return {name: (t.float() if t.is_floating_point() else t).contiguous() for name, t in tensors.items()}


def start(widths, batch, classes, size, seed):
    torch.manual_seed(seed)
    net = Airbench(widths, classes).double()
    net.see(images(64, size, 1))
    for name, t in net.state_dict().items():
        if name.endswith(("bias", "running_mean")):
            t.add_(0.2 * torch.randn_like(t))
        elif "conv" in name:
            # A filter of the identity alone hands on where GELU is all but flat: pools choose among equals.
            t.add_(0.1 * torch.randn_like(t))
        elif name.endswith("running_var"):
            t.mul_(torch.rand_like(t) + 0.5)
    # What is recorded is what was computed with.
    net.load_state_dict({name: t.float() if t.is_floating_point() else t for name, t in net.state_dict().items()})
    return net, images(batch, size, 1000 + seed)


def least_gap(net, x):
    """By how much the largest of a pool's window is ahead of the second, at least: who rounds by more chooses another."""
    gaps = []
    gap = lambda windows: gaps.append(windows.topk(2, dim=-1).values.diff(dim=-1).abs().min().item())

    def convolved(_, __, y):
        rows, columns = (n // 2 * 2 for n in y.shape[2:])
        gap(y[:, :, :rows, :columns].unfold(2, 2, 2).unfold(3, 2, 2).flatten(-2))

    groups = [getattr(net, group) for group in net.groups]
    hooks = [group.conv1.register_forward_hook(convolved) for group in groups]
    hooks.append(groups[-1].register_forward_hook(lambda _, __, y: gap(y.flatten(2))))
    with torch.no_grad():
        copy.deepcopy(net).train()(x)
    for hook in hooks:
        hook.remove()
    return min(gaps)


def record(folder, widths, batch, classes=10, size=32, tries=1):
    """That one of so many whose pools have the clearest choice."""
    starts = [start(widths, batch, classes, size, seed) for seed in range(tries)]
    net, x = max(starts, key=lambda start: least_gap(*start))
    print(f"{widths}: pools choose by {least_gap(net, x):.1e} or more")
    target = torch.arange(batch) * 7 % classes
    tensors = {f"state.{name}": t.clone() for name, t in state(net).items()} | {"input": x}
    logits = net.train()(x)
    loss = F.cross_entropy(logits, target, reduction="sum") / batch
    loss.backward()
    tensors |= {"train.logits": logits, "train.loss": loss}
    tensors |= {f"grad.{name}": p.grad for name, p in net.named_parameters() if p.requires_grad}
    tensors |= {f"after.{name}": t for name, t in state(net).items() if "running" in name or "batches" in name}
    with torch.no_grad():
        logits = net.eval()(x)
    tensors |= {"eval.logits": logits, "eval.loss": F.cross_entropy(logits, target)}
    tensors = rounded({name: t.detach() for name, t in tensors.items()}) | {"target": target}
    config = {"widths": list(widths), "image": size, "in_channels": 3, "num_classes": classes, "batch": batch}
    path = folder / f"airbench_{'_'.join(map(str, widths))}.safetensors"
    save_file(tensors, path, metadata={"model": "airbench", "config": json.dumps(config)})


def main():
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    record(folder, (16, 32, 24), 3, tries=40)
    record(folder, (64, 256, 256), 8)
    pictures = images(9, 11, 3)
    net = Airbench().double()
    net.see(pictures)
    save_file(rounded({"images": pictures}) | {"weight": net.whiten.weight.detach().contiguous()}, folder / "whitening.safetensors")


main()
