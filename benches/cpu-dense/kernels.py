#!/usr/bin/env python3
"""The CPU kernels beside PyTorch's BF16 product of 1024^3, alternating, so that the state of the machine meets both alike.

    taskset -c 0,1 python3 benches/cpu-dense/kernels.py --isa amx --out samples.json

Before and after each round of `kernel_bench` the product is timed; a ratio is a kernel's rate over the mean of the two. Processors
with AMX lower its rate by up to a factor of five for seconds at a time (see docs/benchmarks/README.md), so look at every round.
"""

import argparse
import json
import statistics
import subprocess
import time

import torch

BENCH = "target/release/examples/kernel_bench"


def gemm(samples):
    """The median rate in GF/s."""
    a = torch.randn(1024, 1024, dtype=torch.bfloat16)
    b = torch.randn(1024, 1024, dtype=torch.bfloat16)
    times = []
    for _ in range(samples + samples // 4):
        begin = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - begin)
    return 2 * 1024**3 / statistics.median(times[samples // 4:]) / 1e9


def kernels(args):
    command = [args.bench, "--isa", args.isa, "--threads", str(args.threads), "--rounds", "1"]
    command += ["--filter", args.filter, "--json"]
    out = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return {row["what"]: row["rates"][0] for row in out["rows"] if row["unit"] == "GF/s"}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bench", default=BENCH, help="the example of mlakit-cpu, built with --release")
    parser.add_argument("--isa", required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=40, help="products before and after a round")
    parser.add_argument("--filter", default="dense")
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    products, rates, ratios = [], {}, {}
    for _ in range(args.rounds):
        before = gemm(args.samples)
        found = kernels(args)
        after = gemm(args.samples)
        products.append([before, after])
        for what, rate in found.items():
            rates.setdefault(what, []).append(rate)
            ratios.setdefault(what, []).append(2 * rate / (before + after))
    print("GEMM before and after", [[round(x) for x in pair] for pair in products])
    for what, values in rates.items():
        median = statistics.median(ratios[what])
        print(f"{what:<44} of GEMM {median:.2f}, GF/s {[round(x) for x in values]}")
    if args.out:
        with open(args.out, "w") as file:
            json.dump({
                "torch": torch.__version__, "isa": args.isa, "threads": args.threads,
                "gemm_gf_s": products, "rates_gf_s": rates, "of_gemm": ratios,
            }, file, indent=1)


if __name__ == "__main__":
    main()
