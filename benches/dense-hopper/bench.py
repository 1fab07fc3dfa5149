"""Times the Hopper dense decode kernel beside FlashMLA in captured graphs.

`python bench.py --out FILE.json [--only NAME,NAME] [--variants NAME,NAME]`. One graph replays one
call for each of the rotating sets (more than 400 MB of keys together, pages of 64 shuffled); ours
and the peer's replays alternate; the samples are microseconds a call.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys

import torch

from harness import Kernel, Problem, pool_view

try:
    from flash_mla import flash_mla_with_kvcache, get_mla_metadata
except ImportError:
    flash_mla_with_kvcache = None

# requests, rows a request, heads, tokens: microseconds of the best peer as recorded, to reach
SHAPES = {
    (1, 1, 16, 4096): (17.0, 9), (1, 1, 16, 32768): (29.2, 16), (1, 1, 16, 131072): (56.5, 42),
    (1, 1, 16, 1048576): (298, 290), (1, 1, 128, 32768): (42.5, 25), (4, 1, 16, 32768): (49.8, 41),
    (8, 1, 16, 4096): (22.4, 14), (8, 1, 15, 32768): (83.0, 76), (8, 1, 11, 32768): (83.0, 76),
    (8, 1, 14, 32768): (83.0, 76), (32, 1, 16, 4096): (45.8, 41), (128, 1, 16, 4096): (144.2, None),
    (128, 1, 16, 16384): (548, None), (64, 1, 128, 8192): (215, None),
    (128, 1, 128, 4096): (221, None), (1, 4, 16, 32768): (34.9, 18), (8, 4, 16, 8192): (36.8, 24),
}
SET_BYTES = 420e6
MIXED_SEEDS = (1, 2)  # 32 requests of 16 heads, lengths from 1 to 131,072


def clocks():
    query = "clocks.sm,clocks.mem,power.draw,temperature.gpu,driver_version,name"
    text = subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
                          capture_output=True, text=True).stdout
    return text.strip()


class Pool:
    def __init__(self, pages):
        self.cache = torch.empty(pages, 64, 576, dtype=torch.bfloat16, device="cuda")
        for begin in range(0, pages, 8192):
            self.cache[begin : begin + 8192].normal_()
        self.views = {}


def sets_of(pool, shape):
    """Page tables of disjoint shuffled pages, and their queries."""
    requests, rows, heads, tokens = shape
    width = tokens // 64
    need = requests * width
    count = max(1, min(pool.cache.shape[0] // need, math.ceil(SET_BYTES / (need * 73728))))
    order = torch.randperm(pool.cache.shape[0], device="cuda", dtype=torch.int32)
    result = []
    for i in range(count):
        table = order[i * need : (i + 1) * need].view(requests, width).contiguous()
        q = torch.randn(requests * rows, heads, 576, device="cuda").bfloat16()
        result.append((q, table))
    return result


def choose(pair, rows, options):
    """Narrow tiles where a request fits into one; `wide` asks for wide tiles all the same."""
    return pair[1] if rows <= 16 and not options.get("wide") else pair[0]


def our_calls(kernel, pool, sets, shape, options):
    requests, rows, heads, tokens = shape
    lens = torch.full((requests,), tokens, dtype=torch.int32, device="cuda")
    offsets = torch.arange(requests + 1, dtype=torch.int32, device="cuda") * rows
    if kernel not in pool.views:
        pool.views[kernel] = pool_view(pool.cache, 576, kernel)
    calls = [Problem(kernel, q, pool.cache, table, lens, offsets, 576**-0.5,
                     view=pool.views[kernel], **options)
             for q, table in sets]
    return calls, [call.launch for call in calls]


def peer_calls(pool, sets, shape):
    requests, rows, heads, tokens = shape
    lens = torch.full((requests,), tokens, dtype=torch.int32, device="cuda")
    meta = get_mla_metadata()[0]
    kv = pool.cache.unsqueeze(2)
    outs = [None] * len(sets)

    def call(i):
        q, table = sets[i]
        outs[i] = flash_mla_with_kvcache(q.view(requests, rows, heads, 576), kv, table, lens, 512,
                                         meta, softmax_scale=576**-0.5, causal=rows > 1)[0]

    return outs, [lambda i=i: call(i) for i in range(len(sets))]


def capture(calls):
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    repeats = math.ceil(8 / len(calls))
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    return graph, repeats * len(calls)


def time_graphs(graphs, replays):
    """Alternating replays; microseconds a call, for each graph."""
    samples = {name: [] for name in graphs}
    for name, (graph, _) in graphs.items():
        graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(replays):
        for name, (graph, calls) in graphs.items():
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples[name].append(begin.elapsed_time(end) * 1000 / calls)
    return samples


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--variants", default="bf16")
    parser.add_argument("--replays", type=int, default=21)
    parser.add_argument("--mixed", action="store_true")
    arguments = parser.parse_args()
    available = {
        "bf16": (dict(), dict()), "f32": (dict(f32=True), dict()),
        "wide": (dict(), dict(wide=True)), "copy": (dict(tensor_map=False), dict()),
        "plain": (dict(), dict(cooperative=False)), "pdl": (dict(), dict(dependent=True)),
        "fixed256": (dict(), dict(fixed_tokens=256)),
        "fixed2048": (dict(), dict(fixed_tokens=2048)),
    }
    variants = {}
    for name in arguments.variants.split(","):
        make, options = available[name]
        pair = [Kernel(narrow=narrow, **make).start_compile() for narrow in (False, True)]
        variants[name] = (pair, options)
    for pair, _ in variants.values():
        for kernel in pair:
            kernel.load()
    only = {tuple(int(n) for n in s.split("x")) for s in arguments.only.split(",") if s}
    chosen = [shape for shape in SHAPES if not only or shape in only]
    pool = Pool(max(b * t // 64 for (b, _, _, t) in chosen) + 8192)
    results = []
    for shape in chosen:
        recorded, goal = SHAPES[shape]
        results.append(measure(shape, recorded, goal, pool, variants, arguments.replays))
    for seed in MIXED_SEEDS if arguments.mixed else ():
        results.append(measure_mixed(seed, variants, arguments.replays))
    record = {"command": " ".join(sys.argv), "unit": "microseconds a call", "clocks": clocks(),
              "torch": torch.__version__, "results": results}
    with open(arguments.out, "w") as file:
        json.dump(record, file)


def measure(shape, recorded, goal, pool, variants, replays):
    sets = sets_of(pool, shape)
    graphs, keep = {}, []
    for name, (pair, options) in variants.items():
        kernel = choose(pair, shape[1] * shape[2], options)
        outs, calls = our_calls(kernel, pool, sets, shape, options)
        keep.append(outs)
        graphs[name] = capture(calls)
    if flash_mla_with_kvcache:
        outs, calls = peer_calls(pool, sets, shape)
        graphs["flashmla"] = capture(calls)
        keep.append(outs)
    result = {"shape": shape, "sets": len(sets), "recorded_peer": recorded, "reach": goal}
    return report("x".join(map(str, shape)), result, graphs, keep, replays)


def measure_mixed(seed, variants, replays):
    generator = torch.Generator().manual_seed(seed)
    lens = torch.randint(1, 131073, (32,), generator=generator, dtype=torch.int32)
    width = int(-(-lens.max() // 64))
    pool = Pool(int((-(-lens // 64)).sum()))
    order = torch.randperm(pool.cache.shape[0], dtype=torch.int32)
    table, used = torch.full((32, width), -1, dtype=torch.int32), 0
    for b, n in enumerate((-(-lens // 64)).tolist()):
        table[b, :n] = order[used : used + n]
        used += n
    table, lens = table.cuda(), lens.cuda()
    q = torch.randn(32, 16, 576, device="cuda").bfloat16()
    offsets = torch.arange(33, dtype=torch.int32, device="cuda")
    graphs, keep = {}, []
    for name, (pair, options) in variants.items():
        kernel = choose(pair, 16, options)
        call = Problem(kernel, q, pool.cache, table, lens, offsets, 576**-0.5, **options)
        keep.append([call])
        graphs[name] = capture([call.launch])
    if flash_mla_with_kvcache:
        meta, outs = get_mla_metadata()[0], [None]

        def peer():
            outs[0] = flash_mla_with_kvcache(q.view(32, 1, 16, 576), pool.cache.unsqueeze(2), table,
                                             lens, 512, meta, softmax_scale=576**-0.5)[0]

        graphs["flashmla"] = capture([peer])
        keep.append(outs)
    floor = int(lens.sum()) * 1152 / 4.3e6
    result = {"mixed_seed": seed, "lens": lens.tolist(), "floor": floor, "reach": floor * 1.15 + 8}
    return report(f"mixed {seed}, floor {floor:.1f}", result, graphs, keep, replays)


def report(name, result, graphs, keep, replays):
    before = clocks()
    samples = time_graphs(graphs, replays)
    result.update(samples=samples, clocks_before=before, clocks_after=clocks())
    result["medians"] = {key: statistics.median(s) for key, s in samples.items()}
    if flash_mla_with_kvcache:
        ours = keep[0][0].out.float()
        peer = keep[-1][0].float().view_as(ours)
        result["relative_difference_from_peer"] = ((ours - peer).norm() / ours.norm()).item()
    times = " ".join(f"{key} {value:.2f}" for key, value in result["medians"].items())
    print(f"{name:20s} {times} | peer {result.get('recorded_peer')} reach {result['reach']}",
          flush=True)
    return result


if __name__ == "__main__":
    main()
