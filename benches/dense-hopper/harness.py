"""Runs the Hopper dense decode kernel from its sources: compile, tensor maps, launch.

Needs PyTorch, nvcc 13.0 and a Hopper GPU. Compiled code is kept in the folder that
MLAKIT_BENCH_CUBINS names, if it does. The driver is called through ctypes, as a device of
mlakit would call it; nothing of the kernel is known to PyTorch.
"""

import ctypes
import hashlib
import math
import os
import pathlib
import struct
import subprocess
import tempfile

import torch

KERNELS = pathlib.Path(__file__).resolve().parents[2] / "crates/mlakit-cuda/kernels"
SOURCES = ("hopper_ptx.cuh", "dense_work.cuh", "dense_merge.cuh", "hopper_dense_keys.cuh",
           "hopper_dense_{}.cu", "hopper_dense_main.cuh")
BLOCK_TOKENS = 64

driver = ctypes.CDLL("libcuda.so.1")


def check(status, what):
    if status != 0:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"{what}: {status} {text.value}")


class Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_ubyte * 64)]


class LaunchConfig(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", ctypes.c_uint),
    ]


class Kernel:
    """One compiled specialisation."""

    def __init__(self, qk=576, value=512, f32=False, tensor_map=True, narrow=False):
        self.qk, self.value, self.f32, self.tensor_map = qk, value, f32, tensor_map
        self.tile_rows = 16 if narrow else 64
        self.defines = [
            f"-DQK_WIDTH={qk}",
            f"-DVALUE_WIDTH={value}",
            f"-DPARTIAL_F32={int(f32)}",
            f"-DUSE_TENSOR_MAP={int(tensor_map)}",
            f"-DNARROW={int(narrow)}",
        ]
        self.process = None

    def sources(self):
        shape = "narrow" if self.tile_rows == 16 else "wide"
        return [name.format(shape) for name in SOURCES]

    def start_compile(self):
        self.folder = pathlib.Path(tempfile.mkdtemp())
        source = self.folder / "kernel.cu"
        text = "".join((KERNELS / name).read_text() for name in self.sources())
        source.write_text(text)
        key = hashlib.sha256((text + str(self.defines)).encode()).hexdigest()[:16]
        self.kept = pathlib.Path(os.environ.get("MLAKIT_BENCH_CUBINS", self.folder)) / f"{key}.cubin"
        if self.kept.exists():
            self.process = subprocess.Popen(["true"])
            return self
        command = ["nvcc", "-std=c++17", "-cubin", "-gencode", "arch=compute_90a,code=sm_90a"]
        command += [*self.defines, "-o", str(self.kept), str(source)]
        self.process = subprocess.Popen(command, stderr=open(self.folder / "log", "w"))
        return self

    def load(self):
        if self.process is None:
            self.start_compile()
        if self.process.wait() != 0:
            raise RuntimeError(f"nvcc failed for {self.defines}")
        torch.zeros(1, device="cuda")
        module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        image = self.kept.read_bytes()
        check(driver.cuModuleLoadData(ctypes.byref(module), image), "load")
        name = b"mlakit_dense_decode"
        check(driver.cuModuleGetFunction(ctypes.byref(self.function), module, name), "function")
        self.shared = self.constant(module, b"mlakit_dense_decode_shared_bytes")
        self.threads = self.constant(module, b"mlakit_dense_decode_threads")
        check(driver.cuFuncSetAttribute(self.function, 8, self.shared), "shared memory")
        local = ctypes.c_int()
        check(driver.cuFuncGetAttribute(ctypes.byref(local), 3, self.function), "local memory")
        assert local.value == 0, f"{local.value} bytes of local memory"
        return self


    @staticmethod
    def constant(module, name):
        address, size, word = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_int()
        check(driver.cuModuleGetGlobal_v2(ctypes.byref(address), ctypes.byref(size), module, name),
              "constant")
        check(driver.cuMemcpyDtoH_v2(ctypes.byref(word), address, 4), "constant")
        return word.value


def box_tokens(page_size):
    return next((n for n in (64, 32, 16) if page_size % n == 0), 0)


def pool_view(cache, qk, kernel, promotion=2):
    """The PoolView of a cache: BF16 [pages, page_size, width]. Where address or strides are not
    multiples of 16 bytes there is no tensor map.

    `promotion` 2: L2 fetches 128 bytes at a time (256 costs up to 8 % of the stream).
    """
    pages, page_size = cache.shape[0], cache.shape[1]
    page_stride, token_stride = cache.stride(0) * 2, cache.stride(1) * 2
    words = [0] * 16
    box = box_tokens(page_size)
    mapped = kernel.tensor_map and (cache.data_ptr() | page_stride | token_stride) % 16 == 0
    if mapped:
        raw = (ctypes.c_ubyte * 256)()
        address = (ctypes.addressof(raw) + 63) & ~63
        status = driver.cuTensorMapEncodeTiled(
            ctypes.c_void_p(address), 9, 3, ctypes.c_void_p(cache.data_ptr()),
            (ctypes.c_uint64 * 3)(qk, page_size, pages),
            (ctypes.c_uint64 * 2)(token_stride, page_stride),
            (ctypes.c_uint32 * 3)(64, box, 1), (ctypes.c_uint32 * 3)(1, 1, 1), 0, 3, promotion, 0)
        check(status, "tensor map")
        words = list((ctypes.c_uint64 * 16).from_address(address))
    image = struct.pack("<3Q26I16Q", cache.data_ptr(), pages, page_stride, int(mapped), *[0] * 25,
                        *words)
    return torch.frombuffer(bytearray(image), dtype=torch.uint8).cuda()


class Problem:
    """Inputs, outputs and scratch of one launch."""

    def __init__(self, kernel, q, cache, page_table, kv_lens, q_offsets, scale, **options):
        self.kernel = kernel
        self.cooperative = options.get("cooperative", True)
        self.dependent = options.get("dependent", False)
        rows, heads, _ = q.shape
        batch, table_width = page_table.shape
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        self.blocks = min(options.get("blocks") or sms, sms)
        fixed = options.get("fixed_tokens", 0) // BLOCK_TOKENS
        covered = table_width * cache.shape[1]
        most = -(-covered // BLOCK_TOKENS)  # key blocks of a request
        splits = -(-most // fixed) if fixed else min(self.blocks, most)
        # As the device of mlakit does: slots are splits of all pairs where that takes less.
        by_block = 2 * self.blocks * min(kernel.tile_rows, rows * heads)
        by_pair = fixed or splits * rows * heads <= by_block
        self.slots = splits if by_pair else 2 * self.blocks
        partial_rows = 0 if by_pair else min(kernel.tile_rows, rows * heads)
        device = q.device
        fill = options.get("poison", 0xFF)
        size = 4 if kernel.f32 else 2
        count = splits * rows * heads if by_pair else by_block
        self.partials = torch.full((count * kernel.value * size,), fill, dtype=torch.uint8,
                                   device=device)
        self.partial_lse = torch.full((count,), math.nan, device=device)
        self.faults = torch.zeros(64, dtype=torch.int32, device=device)
        self.out = torch.full((rows, heads, kernel.value), math.nan, dtype=torch.bfloat16,
                              device=device)
        self.lse = torch.full((rows, heads), math.nan, device=device)
        self.view = options.get("view")
        if self.view is None:
            self.view = pool_view(cache, kernel.qk, kernel)
        row_lens = options.get("row_kv_lens")
        self.inputs = (q, cache, page_table, kv_lens, q_offsets, row_lens)
        pointers = [q, self.out, self.lse, page_table, kv_lens, q_offsets, row_lens, self.view,
                    self.partials, self.partial_lse, self.faults]
        self.params = struct.pack(
            "<11Q12i2f", *[0 if t is None else t.data_ptr() for t in pointers], rows, batch, heads,
            table_width, covered, partial_rows, self.slots, fixed, cache.shape[1],
            box_tokens(cache.shape[1]), cache.stride(1) * 2, options.get("columns", 8),
            scale * math.log2(math.e), math.log(2.0))

    def launch(self):
        block = ctypes.create_string_buffer(self.params, len(self.params))
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(block))
        # COOPERATIVE, PROGRAMMATIC_STREAM_SERIALIZATION
        ids = [2] * self.cooperative + [6] * self.dependent
        attributes = (Attribute * 2)()
        for attribute, number in zip(attributes, ids):
            attribute.id = number
            attribute.value[0] = 1
        config = LaunchConfig()
        config.grid[:] = [self.blocks, 1, 1]
        config.block[:] = [self.kernel.threads, 1, 1]
        config.shared_bytes = self.kernel.shared
        config.stream = torch.cuda.current_stream().cuda_stream
        config.attributes = attributes
        config.count = len(ids)
        status = driver.cuLaunchKernelEx(ctypes.byref(config), self.kernel.function, arguments,
                                         None)
        check(status, "launch")


def reference(q, cache, page_table, kv_lens, q_offsets, scale, value, row_kv_lens=None):
    """Softmax attention in F64 on the same BF16 inputs; ids out of bounds are skipped.

    A key that is not finite makes the rows that see it NaN, and no others.
    """
    rows, heads, qk = q.shape
    pages, page_size = cache.shape[0], cache.shape[1]
    out = torch.zeros(rows, heads, value, dtype=torch.float64, device=q.device)
    lse = torch.full((rows, heads), -math.inf, dtype=torch.float64, device=q.device)
    end = min(max(int(q_offsets[0]), 0), rows)
    for b in range(page_table.shape[0]):
        begin, end = end, max(end, min(max(int(q_offsets[b + 1]), 0), rows))
        length = min(max(int(kv_lens[b]), 0), page_table.shape[1] * page_size)
        if length == 0 or begin == end:
            continue
        ids = page_table[b, : -(-length // page_size)].long()
        good = (ids >= 0) & (ids < pages)
        keys = cache[ids.clamp(0, pages - 1), :, :qk].reshape(-1, qk)[:length].double()
        good = good.repeat_interleave(page_size)[:length]
        keys = torch.where(good[:, None], keys, 0)
        spoilt = ~torch.isfinite(keys).all(1)
        keys = torch.where(spoilt[:, None], 0, keys)
        scores = torch.einsum("rhd,kd->rhk", q[begin:end].double(), keys) * scale
        position = torch.arange(length, device=q.device)
        n = end - begin
        seen = torch.tensor([length - (n - 1 - i) for i in range(n)], device=q.device)
        if row_kv_lens is not None:
            seen = row_kv_lens[begin:end].clamp(0, length)
        mask = (position[None, :] < seen[:, None]) & good[None, :]
        scores = scores.masked_fill(~mask[:, None, :], -math.inf)
        lse[begin:end] = torch.logsumexp(scores, -1)
        weights = torch.softmax(scores, -1).nan_to_num(0.0)
        out[begin:end] = torch.einsum("rhk,kv->rhv", weights, keys[:, :value])
        rows_spoilt = torch.arange(begin, end, device=q.device)[(mask & spoilt).any(1)]
        out[rows_spoilt], lse[rows_spoilt] = math.nan, math.nan
    return out, lse
