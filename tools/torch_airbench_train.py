"""airbench94's training by PyTorch on this machine's cores, for comparison with `taper train recipes/cifar10/airbench94.yaml`.

    python tools/torch_airbench_train.py DATA [--epochs 1] [--threads 2] [--bf16]

DATA holds `plain_text/{train,test}/0000.parquet`, CIFAR-10 as the Hugging Face hub has it. Needs torch, numpy, pyarrow and pillow.
PyTorch gets its best mode: channels_last, fused SGD, gradients set to None, augmentation of a whole epoch at once, and with --bf16
autocast. Prints the seconds of each epoch (training alone) and, after the last, the accuracy with the views of the paper.
"""

import argparse
import io
import math
import time

import numpy as np
import pyarrow.parquet as parquet
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

from torch_nets import Airbench

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
EPOCHS, BATCH, MOMENTUM, EVERY = 9.9, 1024, 0.85, 5


def read(folder, split):
    table = parquet.read_table(f"{folder}/plain_text/{split}/0000.parquet")
    pictures = [np.asarray(Image.open(io.BytesIO(row["bytes"]))) for row in table["img"].to_pylist()]
    x = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 255
    x = (x - torch.tensor(MEAN).view(1, 3, 1, 1)) / torch.tensor(STD).view(1, 3, 1, 1)
    return x, torch.tensor(table["label"].to_pylist())


def cropped(x, shift=2):
    """Every image moved by up to `shift` pixels each way, between mirrors."""
    n, _, size, _ = x.shape
    padded = F.pad(x, (shift,) * 4, "reflect")
    top, left = torch.randint(2 * shift + 1, (2, n))
    out = torch.empty_like(x)
    for y in range(2 * shift + 1):
        for z in range(2 * shift + 1):
            here = (top == y) & (left == z)
            out[here] = padded[here, :, y : y + size, z : z + size]
    return out


def factor(step, steps):
    """The rate: up from a fifth for 23 % of the steps, then down to 7 %."""
    peak = 0.23 * steps
    return 0.2 + 0.8 * step / peak if step < peak else 1 - 0.93 * (step - peak) / (steps - peak)


def views(net, x):
    """The logits of an image, its mirror image, and both moved by a pixel one way and the other."""
    both = lambda x: 0.5 * net(x) + 0.5 * net(x.flip(-1))
    padded, size = F.pad(x, (1,) * 4, "reflect"), x.shape[-1]
    moved = [padded[:, :, i : i + size, i : i + size] for i in (0, 2)]
    return 0.5 * both(x) + 0.25 * sum(both(x) for x in moved)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.add_argument("--epochs", type=float, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    (x, y), (test_x, test_y) = read(args.data, "train"), read(args.data, "test")
    net = Airbench()
    with torch.no_grad():
        net.see(x[:5000])
    net = net.to(memory_format=torch.channels_last)
    whitening = [p for name, p in net.named_parameters() if name == "whiten.bias"]
    norms = [p for name, p in net.named_parameters() if "norm" in name and p.requires_grad]
    rest = [p for name, p in net.named_parameters() if "norm" not in name and p.requires_grad]
    # For a mean loss; see the recipe.
    rate, decay = 1.5, 1.33043e-3
    groups = [{"params": rest, "lr": rate, "weight_decay": decay},
              {"params": norms, "lr": 64 * rate, "weight_decay": decay / 64}]
    sgd = torch.optim.SGD(groups, lr=rate, momentum=MOMENTUM, nesterov=True, fused=True)
    rates = [group["lr"] for group in sgd.param_groups]
    loss = nn.CrossEntropyLoss(label_smoothing=0.2)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=args.bf16)
    an_epoch = len(x) // BATCH
    steps, wanted = math.ceil(EPOCHS * an_epoch), math.ceil(args.epochs * an_epoch)
    slow = {name: t.clone() for name, t in net.state_dict().items()}
    mirrored = torch.rand(len(x)) < 0.5
    step, epoch = 0, 0
    while step < min(steps, wanted):
        start = time.perf_counter()
        images = cropped(torch.where((mirrored ^ (epoch % 2 == 1)).view(-1, 1, 1, 1), x.flip(-1), x))
        for picked in torch.randperm(len(x))[: an_epoch * BATCH].view(an_epoch, BATCH):
            if step == 3 * an_epoch:
                whitening[0].requires_grad_(False)
                whitening[0].grad = None
            for group, full in zip(sgd.param_groups, rates):
                group["lr"] = full * factor(step, steps)
            sgd.zero_grad(set_to_none=True)
            with autocast:
                value = loss(net(images[picked].to(memory_format=torch.channels_last)), y[picked])
            value.backward()
            sgd.step()
            step += 1
            if step % EVERY == 0:
                stays = 0.95**EVERY * (step / steps) ** 3
                with torch.no_grad():
                    for name, t in net.state_dict().items():
                        if t.is_floating_point():
                            t.copy_(slow[name].lerp_(t, 1 - stays))
            if step >= min(steps, wanted):
                break
        epoch += 1
        print(f"epoch {epoch}: {time.perf_counter() - start:.1f} s, loss {value.item():.4f}", flush=True)
    net.load_state_dict(slow)
    net.eval()
    with torch.inference_mode(), autocast:
        right = sum((views(net, x).argmax(1) == y).sum().item() for x, y in zip(test_x.split(500), test_y.split(500)))
    print(f"accuracy {100 * right / len(test_x):.2f} % after {step} steps")


if __name__ == "__main__":
    main()
