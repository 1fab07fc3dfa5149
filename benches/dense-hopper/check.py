"""Correctness of the Hopper dense decode kernel against F64. Prints one line a case; exits 1 on a
failure. `python check.py [--quick | --sanitize]`: the main specialisations only; a few small cases,
to run under compute-sanitizer."""

import itertools
import math
import random
import sys

import torch

from harness import Kernel, Problem, reference

# BF16 rounding of an exact result already has 1.64e-3. Weights rounded to BF16 add up to 1.6e-3 on
# short random requests (their errors do not average out), BF16 partials up to 1.6e-3 on two splits.
LIMIT = 2.9e-3
TIGHT_LIMIT = 1.8e-3  # F32 partials, 32,768 tokens and more
BASE = ("bf16", "f32", "copy", "narrow", "narrow f32", "narrow copy")
failures = []


def make(rng, lens, rows, heads, page, qk, value, extra=()):
    """A pool with twice the pages needed: unused pages, page tails and padding are NaN."""
    record, tail = qk + 8 * (rng.random() < 0.5), 16 * (rng.random() < 0.5)
    width = max(1, max(-(-max(n, 0) // page) for n in lens)) + 1
    needed = [-(-max(n, 0) // page) for n in lens]
    pages = 2 * sum(needed) + 2
    memory = torch.full((pages, page + tail, record), math.nan, dtype=torch.bfloat16, device="cuda")
    cache = memory[:, :page, :]
    order = list(range(pages))
    rng.shuffle(order)
    table = torch.full((len(lens), width), 2**30, dtype=torch.int32)
    for b, n in enumerate(lens):
        ids = [order.pop() for _ in range(needed[b])]
        table[b, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        for i, page_id in enumerate(ids):
            live = min(page, n - i * page)
            cache[page_id, :live, :qk] = torch.randn(live, qk, device="cuda").bfloat16()
    offsets = torch.tensor([0, *itertools.accumulate(rows)], dtype=torch.int32)
    q = torch.randn(int(offsets[-1]), heads, qk, device="cuda").bfloat16()
    return q, cache, table.cuda(), torch.tensor(lens, dtype=torch.int32).cuda(), offsets.cuda()


def report(name, ok, text):
    print(f"{'ok  ' if ok else 'FAIL'} {name} {text}", flush=True)
    if not ok:
        failures.append(name)


def first_mismatch(out, expected):
    error = (out.double() - expected).abs() / (expected.abs() + 1e-2)
    error = error.nan_to_num(math.inf)
    at = int(error.flatten().argmax())
    index = torch.unravel_index(torch.tensor(at), out.shape)
    index = tuple(int(i) for i in index)
    return f"at {index}: {out[index].item()} for {expected[index].item()}"


def case(name, kernel, data, scale, faults=0, **options):
    q, cache, table, lens, offsets = data
    expected, expected_lse = reference(q, cache, table, lens, offsets, scale, kernel.value,
                                       options.get("row_kv_lens"))
    problem = Problem(kernel, q, cache, table, lens, offsets, scale, **options)
    problem.launch()
    torch.cuda.synchronize()
    out, lse = problem.out.clone(), problem.lse.clone()
    spoilt = torch.isnan(expected)
    nan = torch.equal(torch.isnan(out), spoilt)
    nan &= torch.equal(torch.isnan(lse), torch.isnan(expected_lse))
    expected = expected.masked_fill(spoilt, 0)
    difference = (out.double() - expected).masked_fill(spoilt, 0)
    norm = expected.norm()
    error = (difference.norm() / norm).item() if norm > 0 else 0.0
    finite = torch.isfinite(expected_lse)
    lse_error = (lse.double() - expected_lse)[finite].abs().max().item() if finite.any() else 0.0
    none = expected_lse == -math.inf
    empty = bool((lse[none] == -math.inf).all()) and bool((out[none] == 0).all())
    counted = int(problem.faults[:3].sum())
    same = True
    for _ in range(3):
        problem.out.fill_(math.nan)
        problem.partials.fill_(0x7F)
        problem.launch()
        torch.cuda.synchronize()
        same &= torch.equal(problem.out.view(torch.int16), out.view(torch.int16))
        same &= torch.equal(problem.lse.view(torch.int32), lse.view(torch.int32))
    left = int(problem.faults[3:].abs().sum())
    limit = TIGHT_LIMIT if kernel.f32 and int(lens.min()) >= 32768 else LIMIT
    ok = error <= limit and lse_error <= 2e-3 and empty and same and left == 0 and counted == faults
    ok = ok and nan
    rounded = ((expected.bfloat16().double() - expected).norm() / norm).item() if norm > 0 else 0.0
    text = f"rel {error:.2e} (exact {rounded:.2e}) lse {lse_error:.1e} repeats {same}"
    text += f" empty {empty} nan {nan} faults {counted}"
    report(name, ok, text if ok else text + f" left {left} " + first_mismatch(out, expected))
    return out


def main():
    quick = "--quick" in sys.argv or "--sanitize" in sys.argv
    rng = random.Random(7)
    torch.manual_seed(7)
    kernels = {
        "bf16": Kernel(), "f32": Kernel(f32=True), "copy": Kernel(tensor_map=False),
        "narrow": Kernel(narrow=True), "narrow f32": Kernel(narrow=True, f32=True),
        "narrow copy": Kernel(narrow=True, tensor_map=False),
        "512/512": Kernel(512, 512), "narrow 512/512": Kernel(512, 512, narrow=True),
        "320/256": Kernel(320, 256), "288/256": Kernel(288, 256), "160/128": Kernel(160, 128),
    }
    if quick:
        kernels = {name: kernels[name] for name in BASE}
    for kernel in kernels.values():
        kernel.start_compile()
    for kernel in kernels.values():
        kernel.load()
    scale = 576**-0.5
    if "--sanitize" in sys.argv:
        for name in BASE:
            case(name, kernels[name], make(rng, [700, 0, 65], [2, 1, 1], 40, 64, 576, 512), scale)
        sys.exit(1 if failures else 0)
    base = [
        ([64], [1], 16, 64), ([1], [1], 16, 64), ([63], [1], 1, 64), ([200], [1], 128, 64),
        ([4097], [1], 16, 64), ([33000], [1], 16, 64),
        ([2049, 64, 65, 0, 1, 4097], [1] * 6, 15, 64),
        ([300, 4097, 2, 0], [4, 2, 3, 1], 16, 64), ([5000, 700], [4, 1], 128, 64),
        ([1000, 0, 130], [1, 0, 2], 99, 64), ([4097, 65], [1, 1], 11, 16),
        ([2049, 31], [2, 1], 3, 48), ([4097, 300, 7], [1, 4, 1], 8, 256),
        ([rng.randrange(0, 3000) for _ in range(150)], [1] * 150, 16, 64),
    ]
    for lens, rows, heads, page in base:
        for name in BASE:
            data = make(rng, lens, rows, heads, page, 576, 512)
            label = f"{name} b{len(lens)} h{heads} page{page} rows{max(rows)} len{max(lens)}"
            case(label, kernels[name], data, scale)
    for lens, rows, heads in (([1000, 65, 0], [1, 3, 1], 16), ([2049], [1], 128)):
        for name in ("copy", "narrow copy"):
            case(f"{name} page1 h{heads}", kernels[name],
                 make(rng, lens, rows, heads, 1, 576, 512), scale)
    for blocks in (1, 2, 7, 33):
        data = make(rng, [4097, 100, 1], [1, 2, 1], 16, 64, 576, 512)
        case(f"bf16 blocks {blocks}", kernels["bf16"], data, scale, blocks=blocks)
    for shape in ("512/512", "narrow 512/512", "320/256", "288/256", "160/128"):
        if shape in kernels:
            kernel = kernels[shape]
            data = make(rng, [4097, 65, 0, 9000], [1, 2, 1, 1], 16, 64, kernel.qk, kernel.value)
            case(shape, kernel, data, kernel.qk**-0.5)
    data = make(rng, [1000, 777], [2, 1], 16, 64, 576, 512)
    seen = torch.tensor([500, 0, 64], dtype=torch.int32, device="cuda")
    case("bf16 row lengths", kernels["bf16"], data, scale, row_kv_lens=seen)
    check_padding(rng, kernels, scale)
    check_strides(rng, kernels, scale)
    check_nan(rng, kernels, scale)
    check_faults(rng, kernels, scale)
    check_fixed(rng, kernels, scale)
    print(f"{len(failures)} failures")
    sys.exit(1 if failures else 0)


def check_padding(rng, kernels, scale):
    """Rows before the first request and behind the last, and offsets that are out of bounds."""
    for name in ("bf16", "copy", "narrow"):
        for heads in (16, 128):
            data = make(rng, [1000, 65, 0], [1, 3, 4], heads, 64, 576, 512)
            for offsets, faults in (([2, 3, 5, 6], 0), ([-1, 4, 3, 99], 3), ([9, 9, 9, 9], 4)):
                moved = torch.tensor(offsets, dtype=torch.int32, device="cuda")
                case(f"{name} h{heads} offsets {offsets}", kernels[name], (*data[:4], moved), scale,
                     faults=faults)


def check_strides(rng, kernels, scale):
    """Keys at addresses and strides that are no multiples of 16 bytes."""
    for name in ("bf16", "copy", "narrow", "narrow copy"):
        for page in (16, 64) if "copy" not in name else (1,):
            q, cache, table, lens, offsets = make(rng, [300, 65], [1, 2], 16, page, 576, 512)
            memory = torch.full((cache.shape[0], page, 579), math.nan, dtype=torch.bfloat16,
                                device="cuda")
            memory[:, :, 1:577] = cache[:, :, :576]
            case(f"{name} page{page} odd strides", kernels[name],
                 (q, memory[:, :, 1:], table, lens, offsets), scale)


def check_faults(rng, kernels, scale):
    for name in ("bf16", "copy", "narrow"):
        q, cache, table, lens, offsets = make(rng, [1000, 300], [1, 2], 128, 64, 576, 512)
        table[0, 3], table[0, 5], table[1, 0] = cache.shape[0], -7, -1
        case(f"{name} bad ids", kernels[name], (q, cache, table, lens, offsets), scale, faults=2)
        lens[1] = 10**9
        table[1, 1:] = table[0, 1]
        case(f"{name} long length", kernels[name], (q, cache, table, lens, offsets), scale,
             faults=3)
        lens[1] = -5
        case(f"{name} negative length", kernels[name], (q, cache, table, lens, offsets), scale,
             faults=3)


def check_nan(rng, kernels, scale):
    """A NaN in a key: the rows that see it are NaN however they are split, the others are not."""
    for name in BASE:
        for lens, rows, heads in (([1000, 130], [4, 1], 4), ([9000, 64], [3, 4], 16)):
            q, cache, table, kv_lens, offsets = make(rng, lens, rows, heads, 64, 576, 512)
            for b, position in ((0, lens[0] - 1), (0, lens[0] - 3), (1, 40)):
                page = int(table[b, position // 64])
                saved = cache[page, position % 64, 100].clone()
                cache[page, position % 64, 100] = math.nan
                data = (q, cache, table, kv_lens, offsets)
                case(f"{name} NaN at {b}, {position} of {lens[b]}", kernels[name], data, scale)
                cache[page, position % 64, 100] = saved


def check_fixed(rng, kernels, scale):
    """With fixed splits a request's bits do not depend on its company."""
    for name in ("bf16", "f32", "narrow"):
        data = make(rng, [4097, 640, 9000, 0, 3], [1, 1, 2, 1, 1], 16, 64, 576, 512)
        q, cache, table, lens, offsets = data
        for tokens in (256, 1024):
            together = case(f"{name} fixed {tokens}", kernels[name], data, scale,
                            fixed_tokens=tokens)
            for b in range(5):
                begin, end = int(offsets[b]), int(offsets[b + 1])
                alone = Problem(kernels[name], q[begin:end], cache, table[b : b + 1],
                                lens[b : b + 1],
                                torch.tensor([0, end - begin], dtype=torch.int32, device="cuda"),
                                scale, fixed_tokens=tokens, blocks=20)
                alone.launch()
                same = torch.equal(alone.out, together[begin:end])
                report(f"{name} fixed {tokens} request {b} alone", same, "same bits")


if __name__ == "__main__":
    main()
