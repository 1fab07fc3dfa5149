#!/usr/bin/env python3
"""Dense decode on a CPU beside PyTorch, in one run, alternating: ratios, and every raw sample.

    taskset -c 0,1 python3 benches/cpu-dense/compare.py --mlakit target/release/mlakit --out samples.json

PyTorch's BF16 product of 1024^3 is the GEMM rate of the machine. An attention of H heads, T tokens, 576/512 wide counts
2 H T (576 + 512) operations. "composed" is matmul, f32 softmax, matmul; "sdpa" is scaled_dot_product_attention with heads as rows
and the value padded to 576. Ratios above 1 mean that mlakit is faster.
"""

import argparse
import json
import platform
import statistics
import subprocess
import time

import torch

QK, V = 576, 512


def timed(run, samples):
    run()
    out = []
    for _ in range(samples):
        begin = time.perf_counter()
        run()
        out.append((time.perf_counter() - begin) * 1e3)
    return out


def gemm(samples):
    a = torch.randn(1024, 1024, dtype=torch.bfloat16)
    b = torch.randn(1024, 1024, dtype=torch.bfloat16)
    return timed(lambda: a @ b, samples)


def composed(heads, tokens, samples):
    q = torch.randn(heads, QK, dtype=torch.bfloat16)
    kv = torch.randn(tokens, QK, dtype=torch.bfloat16)
    keys, values = kv.t(), kv[:, :V]

    def run():
        scores = (q @ keys).float() * QK**-0.5
        return torch.softmax(scores, -1).to(torch.bfloat16) @ values

    return timed(run, samples)


def sdpa(heads, tokens, samples):
    q = torch.randn(1, 1, heads, QK, dtype=torch.bfloat16)
    kv = torch.randn(1, 1, tokens, QK, dtype=torch.bfloat16)
    attend = torch.nn.functional.scaled_dot_product_attention
    return timed(lambda: attend(q, kv, kv), samples)


def mlakit(path, threads, samples, heads, tokens, *more):
    command = [path, "bench", "--json", "--threads", str(threads), "--samples", str(samples)]
    command += ["--heads", str(heads), "--tokens", str(tokens), *more]
    shape = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["shapes"][0]
    return shape["samples_ms"], shape["kernel"]


def tiny(path, threads):
    command = [path, "run", "MACBETH.", "--attention", "dense", "--tokens", "120", "--json"]
    out = subprocess.run(command + ["--threads", str(threads)], check=True, capture_output=True)
    return json.loads(out.stdout)["tokens_per_second"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mlakit", required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--samples", type=int, default=9)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shapes = [(16, 4096), (16, 32768), (128, 4096), (128, 32768)]
    raw = {}

    def keep(name, values):
        raw.setdefault(name, []).extend(values)

    kernel = ""
    for _ in range(args.rounds):
        for heads, tokens in shapes:
            few = max(3, args.samples // 3) if heads * tokens > 1 << 20 else args.samples
            name = f"{heads}x{tokens}"
            keep("gemm", gemm(args.samples))
            values, kernel = mlakit(args.mlakit, args.threads, few, heads, tokens)
            keep(f"mlakit {name}", values)
            keep(f"composed {name}", composed(heads, tokens, few))
            if tokens == 4096:
                keep(f"sdpa {name}", sdpa(heads, tokens, few))
            values, _ = mlakit(args.mlakit, args.threads, few, heads, tokens, "--record", "e4m3")
            keep(f"mlakit e4m3 {name}", values)
        values, _ = mlakit(args.mlakit, args.threads, 5, 16, 4096, "--rows", "64")
        keep("mlakit 64 rows 16x4096", values)
        keep("tiny tokens/s", [tiny(args.mlakit, args.threads) for _ in range(3)])
    median = {name: statistics.median(values) for name, values in raw.items()}
    rate = 2 * 1024**3 / median["gemm"] / 1e6
    print(f"{kernel}, {args.threads} threads, PyTorch {torch.__version__}, GEMM {rate:.1f} GF/s")
    rows = []
    for heads, tokens in shapes:
        name, ops = f"{heads}x{tokens}", 2 * heads * tokens * (QK + V)
        row = {"shape": name, "gf_s": ops / median[f"mlakit {name}"] / 1e6}
        row["of_gemm"] = row["gf_s"] / rate
        row["e4m3_of_gemm"] = ops / median[f"mlakit e4m3 {name}"] / 1e6 / rate
        row["vs_composed"] = median[f"composed {name}"] / median[f"mlakit {name}"]
        if f"sdpa {name}" in median:
            row["vs_sdpa"] = median[f"sdpa {name}"] / median[f"mlakit {name}"]
        rows.append(row)
        print({key: round(v, 3) if isinstance(v, float) else v for key, v in row.items()})
    extend = 64 * 2 * 16 * 4096 * (QK + V) / median["mlakit 64 rows 16x4096"] / 1e6 / rate
    print(f"extend of 64 rows, 16 heads x 4096: {extend:.3f} of the GEMM rate")
    print(f"tiny-dsa: {median['tiny tokens/s']:.0f} tokens/s (best {max(raw['tiny tokens/s']):.0f})")
    with open(args.out, "w") as file:
        json.dump({
            "machine": platform.processor() or platform.machine(),
            "torch": torch.__version__, "kernel": kernel, "threads": args.threads,
            "gemm_gf_s": rate, "rows": rows, "extend_of_gemm": extend, "samples_ms": raw,
        }, file, indent=1)


if __name__ == "__main__":
    main()
