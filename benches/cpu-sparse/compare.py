#!/usr/bin/env python3
"""Sparse decode, indexer and top-k on a CPU beside PyTorch, in one run, alternating: ratios, and every raw sample.

    cargo build --release -p mlakit-cli
    cargo build --release -p mlakit-cpu --example index_bench
    taskset -c 0,1 python3 benches/cpu-sparse/compare.py --mlakit target/release/mlakit \
        --index-bench target/release/examples/index_bench --out samples.json

PyTorch's product of 1024^3 is the GEMM rate of the machine: in BF16, or in F32 where PyTorch is faster in F32 (it has no BF16 kernel for some
processors); both are in the file. Sparse attention of H heads over S selected tokens, 576/512 wide, counts 2 H S (576 + 512) operations;
the indexer 2 x heads x width for each row and key. Ratios above 1 mean that mlakit is faster.
"""

import argparse
import json
import os
import statistics
import subprocess
import time

import torch

SELECTED, TOKENS = 2048, 65536
SHAPES = [(128, "bf16", 0.80), (128, "fp8_656", 0.75), (16, "bf16", 0.60), (16, "fp8_656", None)]


def timed(run, samples):
    run()
    out = []
    for _ in range(samples):
        begin = time.perf_counter()
        run()
        out.append((time.perf_counter() - begin) * 1e3)
    return out


def gemm(dtype, samples):
    a, b = torch.randn(1024, 1024).to(dtype), torch.randn(1024, 1024).to(dtype)
    return timed(lambda: a @ b, samples)


def topk(samples):
    scores = torch.randn(131072)
    return timed(lambda: torch.topk(scores, SELECTED), samples)


def sparse(args, heads, record):
    command = [args.mlakit, "bench", "--op", "sparse", "--json", "--threads", str(args.threads)]
    command += ["--samples", str(args.samples), "--heads", str(heads), "--tokens", str(TOKENS)]
    command += ["--selected", str(SELECTED), "--record", record]
    shape = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["shapes"][0]
    return shape["samples_ms"], shape["kernel"]


def index(args):
    environment = dict(os.environ, MLAKIT_THREADS=str(args.threads))
    out = subprocess.run([args.index_bench, "1"], check=True, capture_output=True, env=environment)
    return [json.loads(line) for line in out.stdout.decode().splitlines()]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mlakit", required=True)
    parser.add_argument("--index-bench", required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--samples", type=int, default=9)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    raw, device, kernel = {}, "", ""

    def keep(name, values):
        raw.setdefault(name, []).extend(values)

    for _ in range(args.rounds):
        for heads, record, _ in SHAPES:
            keep("gemm f32 ms", gemm(torch.float32, args.samples))
            keep("gemm bf16 ms", gemm(torch.bfloat16, 2))
            values, kernel = sparse(args, heads, record)
            keep(f"sparse {heads} {record} ms", values)
        keep("gemm f32 ms", gemm(torch.float32, args.samples))
        for line in index(args):
            device = line.get("device", device)
            if "indexer" in line and (line["rows"], line["keys"]) == (1, TOKENS):
                keep(f"indexer {line['indexer']} GF/s", line["gflops"])
            if "select" in line:
                keep(f"top-k {line['select']} us", line["microseconds"])
        keep("torch.topk ms", topk(20))
    median = {name: statistics.median(values) for name, values in raw.items()}
    rates = {dtype: 2 * 1024**3 / median[f"gemm {dtype} ms"] / 1e6 for dtype in ("f32", "bf16")}
    rate = max(rates.values())
    print(f"{device}, {kernel}, PyTorch {torch.__version__}: GEMM {rates}")
    rows = []
    for heads, record, needed in SHAPES:
        speed = 2 * heads * SELECTED * (576 + 512) / median[f"sparse {heads} {record} ms"] / 1e6
        rows.append({"what": f"sparse, {heads} heads, {record}", "gf_s": speed, "ratio": speed / rate, "needed": needed})
    for name, value in median.items():
        if name.startswith("indexer"):
            rows.append({"what": name, "gf_s": value, "ratio": value / rate, "needed": 0.75})
        if name == "top-k random us":
            rows.append({"what": "top-2,048 of 131,072", "us": value, "ratio": median["torch.topk ms"] * 1e3 / value, "needed": 8})
    for row in rows:
        print({key: round(v, 3) if isinstance(v, float) else v for key, v in row.items()})
    with open(args.out, "w") as file:
        json.dump({
            "device": device, "torch": torch.__version__, "kernel": kernel, "threads": args.threads,
            "gemm_gf_s": rates, "rows": rows, "samples": raw,
        }, file, indent=1)


if __name__ == "__main__":
    main()
