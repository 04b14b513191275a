"""The peer of `bench --peer`: PyTorch on the work that it is told, timed run by run.

Each line of input is JSON: an object prepares work, "run" runs it once. Each is answered by a line of JSON:
a string when ready, the seconds of a run. Argument: the number of threads.
"""
import json
import sys
import time

import torch


def optim(task):
    """One step of a fused optimizer, on the numbers that our own benchmark uses."""
    wave = lambda size, scale: scale * ((torch.arange(size) % 251).float() - 125.5)
    params = [torch.nn.Parameter(wave(size, 0.01)) for size in task["sizes"]]
    for param in params:
        param.grad = wave(param.numel(), 0.001)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[task["optimizer"]]
    step = kind(params, lr=1e-4, fused=True).step
    step()
    return step


WORK = {"optim": optim}


def main():
    torch.set_num_threads(int(sys.argv[1]))
    answer = lambda value: print(json.dumps(value), flush=True)
    answer(f"PyTorch {torch.__version__}")
    work = None
    for line in sys.stdin:
        task = json.loads(line)
        if task == "run":
            started = time.perf_counter()
            work()
            answer(time.perf_counter() - started)
        else:
            work = None  # frees the work before
            work = WORK[task["work"]](task)
            answer("ready")


main()
