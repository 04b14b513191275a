"""Time and peak memory of a training step (forward and backward) in PyTorch, to set beside Taper's `step_time` example.

    python tools/torch_step.py resnet34 128 [channels_last]

Prints the best step in milliseconds and the peak resident memory of the process in megabytes.
"""

import resource
import sys
import time

import torch
from torch.nn import functional as F

from torch_nets import NETS

name, batch = sys.argv[1], int(sys.argv[2])
layout = torch.channels_last if "channels_last" in sys.argv else torch.contiguous_format
torch.set_num_threads(2)
net = NETS[name]().to(memory_format=layout)
images = torch.randn(batch, 3, 32, 32).to(memory_format=layout)
target = torch.arange(batch) % 10
best = float("inf")
for _ in range(3):
    start = time.perf_counter()
    net.zero_grad(set_to_none=True)
    F.cross_entropy(net(images), target).backward()
    best = min(best, time.perf_counter() - start)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
print(f"{name}, batch {batch}, {layout}: best step {best * 1e3:.0f} ms, peak memory {peak} MB")
