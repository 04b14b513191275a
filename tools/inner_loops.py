"""Counts the instructions of inner loops of fused multiply-adds, to estimate their speed on CPUs that are not here.

    cargo test --release -p taper-kernels --lib --no-run --target aarch64-unknown-linux-gnu
    aarch64-linux-gnu-objdump -d --no-show-raw-insn -C PROGRAM | python3 tools/inner_loops.py --fmas 24

A loop is a run of instructions that ends with a jump back to its first and holds no other jump. For each kind of loop: how often
it is in the program, its fused multiply-adds, loads, stores and other instructions, and FLOP a cycle for cores with that many
pipes for vectors, loads and instructions a cycle, all of them always busy: no cache missed, no latency seen. An upper bound.
"""
import argparse
import collections
import re

# Pipes for vectors, loads of 16 bytes and instructions, all a cycle, as their makers or those who measured them say.
CORES = {"Apple M1 (P core)": (4, 3, 8), "Neoverse N1": (2, 2, 4), "Neoverse V1, V2": (4, 3, 8)}
LANES = 4
JUMP = re.compile(r"(b|bl|br|blr|ret|cbn?z|tbn?z)(\.|$)")


def instructions(lines):
    """Address, name and operands of every instruction; `None` where a function begins."""
    for line in lines:
        if re.match(r"[0-9a-f]+ <.*>:$", line):
            yield None
        elif found := re.match(r"\s+([0-9a-f]+):\s+(\S+)\s*(.*)", line):
            yield int(found[1], 16), found[2], found[3]


def loops(code):
    """The loops without other jumps inside, each as the list of its instructions."""
    since = []
    for one in code:
        if one is None:
            since = []
            continue
        since.append(one)
        _, name, operands = one
        if not JUMP.match(name):
            continue
        target = re.search(r"\b([0-9a-f]{3,})\b(?= <)", operands)
        start = next((i for i, (at, _, _) in enumerate(since) if target and at == int(target[1], 16)), None)
        if start is not None:
            yield since[start:]
        since = []


def kind(loop):
    """Fused multiply-adds on vectors, vectors or numbers loaded, stores, and all instructions."""
    fmas = sum(name == "fmla" for _, name, _ in loop)
    loads = sum(2 if name == "ldp" else 1 for _, name, _ in loop if name.startswith("ld"))
    stores = sum(name.startswith("st") for _, name, _ in loop)
    others = sum(name in ("fadd", "fmul", "fsub", "dup", "mov", "zip1", "zip2") and "v" in operands for _, name, operands in loop)
    return fmas, loads, stores, others, len(loop)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fmas", type=int, default=8, help="show loops of at least that many")
    parser.add_argument("disassembly", type=argparse.FileType(), nargs="?", default="-")
    args = parser.parse_args()
    kinds = collections.Counter(kind(loop) for loop in loops(instructions(args.disassembly)))
    print("| in the program | FMA | loads | stores | other vector | all |", " | ".join(f"FLOP/cycle, {core}" for core in CORES), "|")
    print("| ---: " * (6 + len(CORES)) + "|")
    for (fmas, loads, stores, others, all_), count in sorted(kinds.items(), reverse=True):
        if fmas < args.fmas:
            continue
        # What is scarcest decides.
        cycles = [max((fmas + others) / v, (loads + stores) / l, all_ / i) for v, l, i in CORES.values()]
        rates = " | ".join(f"{2 * LANES * fmas / c:.1f}" for c in cycles)
        print(f"| {count} | {fmas} | {loads} | {stores} | {others} | {all_} | {rates} |")


if __name__ == "__main__":
    main()
