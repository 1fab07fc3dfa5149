#!/usr/bin/env python3
"""Writes golden.bin: tokens, and their records by an implementation that shares nothing with the crate.

    pip install numpy ml_dtypes && python3 make.py

Casts to E4M3 and E2M1 are those of ml_dtypes (made with 0.6.0); scales are computed here from docs/formats.md with
numpy's F32. Everything is little-endian and in this order:

    tokens     BF16 [32, 576]       latent = first 512 (448 for v4_584), rotary part = last 64, index key = first 128
    e4m3       U8 [32768]           E4M3 of the BF16 of bits 0 to 32767
    e2m1       U8 [32768]           E2M1 of the same
    then for each format of FORMATS:
    pages      U8 [2, 16 * bytes]   the 32 tokens, 16 a page
    strange    U8 [4, bytes]        random bytes as pages of one token
    values     F32 [4, elements]    what they decode to
"""

import pathlib

import ml_dtypes
import numpy as np

F32 = np.float32
BF16, E4M3, E2M1, E8M0 = (
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float4_e2m1fn,
    ml_dtypes.float8_e8m0fnu,
)
KV_SCALE = F32(0.37)
rng = np.random.default_rng(20250117)
np.seterr(all="ignore")


def e4m3(x):
    """Saturating; a NaN keeps its sign."""
    x = np.asarray(x, F32)
    code = np.clip(x, F32(-448), F32(448)).astype(E4M3).view(np.uint8)
    nan = np.where(np.signbit(x), 0xFF, 0x7F).astype(np.uint8)
    return np.where(np.isnan(x), nan, code)


def e2m1(x):
    """Saturating; NaN is 6."""
    x = np.asarray(x, F32)
    code = np.clip(np.nan_to_num(x, nan=6.0, posinf=6.0, neginf=-6.0), F32(-6), F32(6))
    return code.astype(F32).astype(E2M1).view(np.uint8) & 15


def e4m3_value(code):
    return np.asarray(code, np.uint8).view(E4M3).astype(F32)


def e2m1_value(code):
    return np.asarray(code, np.uint8).view(E2M1).astype(F32)


def power(byte):
    return np.asarray(byte, np.uint8).view(E8M0).astype(F32)


def power_above(x):
    """The byte of the smallest power of two that is not below x, by looking at all of them."""
    bytes_ = np.arange(255, dtype=np.uint8)
    return np.uint8(np.argmax(power(bytes_).astype(np.float64) >= np.float64(x)))


def amax(x):
    magnitudes = np.abs(x[~np.isnan(x)])
    largest = np.max(magnitudes, initial=F32(0))
    return F32(np.minimum(largest, F32(ml_dtypes.finfo(BF16).max)))


def pack(codes):
    return (codes[0::2] | codes[1::2] << 4).astype(np.uint8)


def unpack(bytes_):
    return np.stack([bytes_ & 15, bytes_ >> 4], axis=1).reshape(-1)


def raw(*values):
    return np.concatenate([np.asarray(v).reshape(-1).view(np.uint8) for v in values])


def zeros(count):
    return np.zeros(count, np.uint8)


def groups(x, size):
    return x.reshape(-1, size)


# --- each format: a token (latent in F32, rotary part in BF16, so that payloads of NaN survive) to data and scales, and back ---


def bf16(latent, rope):
    return raw(latent, rope), zeros(0)


def bf16_back(data, _):
    return data.view(BF16).astype(F32)


def plain_e4m3(latent, rope):
    return e4m3(np.concatenate([latent, rope.astype(F32)]) / KV_SCALE), zeros(0)


def plain_e4m3_back(data, _):
    return e4m3_value(data) * KV_SCALE


def fp8(latent, rope):
    scales = [power(power_above(max(amax(g) / F32(448), F32(1e-4)))) for g in groups(latent, 128)]
    codes = [e4m3(g / s) for g, s in zip(groups(latent, 128), scales)]
    return raw(np.array(codes), np.array(scales, F32), rope), zeros(0)


def fp8_back(data, _):
    values = groups(e4m3_value(data[:512]), 128) * data[512:528].view(F32)[:, None]
    return np.concatenate([values.reshape(-1), data[528:].view(BF16).astype(F32)])


def mxfp8(x, size):
    scales = np.array([power_above(max(amax(g), F32(1e-4)) / F32(448)) for g in groups(x, size)])
    codes = np.array([e4m3(g / power(s)) for g, s in zip(groups(x, size), scales)])
    return codes.reshape(-1), scales.astype(np.uint8)


def v4(latent, rope):
    codes, scales = mxfp8(latent, 64)
    return raw(codes, rope), raw(scales, zeros(1))


def v4_back(data, scales):
    values = groups(e4m3_value(data[:448]), 64) * power(scales[:7])[:, None]
    return np.concatenate([values.reshape(-1), data[448:].view(BF16).astype(F32)])


def v41_528(latent, _):
    return raw(*mxfp8(latent, 32)), zeros(0)


def v41_528_back(data, _):
    return (groups(e4m3_value(data[:512]), 32) * power(data[512:])[:, None]).reshape(-1)


def fp4(x, scale_of, unit=F32(1)):
    codes, scales = [], []
    for g in groups(x, 16):
        scale = e4m3(scale_of(amax(g)))
        step = F32(e4m3_value(scale) * unit)
        scales.append(scale)
        codes.append(e2m1(g / step) if step > 0 else zeros(16))
    return pack(np.concatenate(codes)), np.array(scales, np.uint8)


def fp4_back(data, unit=F32(1)):
    values = groups(e2m1_value(unpack(data[:256])), 16) * e4m3_value(data[256:288])[:, None]
    return values.reshape(-1) * unit


def v41_288(latent, _):
    return raw(*fp4(latent, lambda a: max(a, F32(6 / 512)) / F32(6))), zeros(0)


def nvfp4_432(latent, rope):
    return raw(*fp4(latent, lambda a: a / F32(6)), zeros(16), rope), zeros(0)


def rope_fp8(rope):
    rope = rope.astype(F32)
    scale = F32(amax(rope) / F32(448))
    return scale, e4m3(rope / scale) if scale > 0 else zeros(64)


def nvfp4_368(latent, rope):
    scale, codes = rope_fp8(rope)
    return raw(*fp4(latent, lambda a: a / F32(6)), scale, zeros(12), codes), zeros(0)


def token_scaled(latent):
    unit = F32(amax(latent) / F32(2688))
    if unit == 0:
        return unit, zeros(256), zeros(32)
    return unit, *fp4(latent, lambda a: F32(a / unit) / F32(6), unit)


def nvfp4_368t(latent, rope):
    unit, codes, scales = token_scaled(latent)
    scale, rope_codes = rope_fp8(rope)
    return raw(codes, scales, scale, unit, zeros(8), rope_codes), zeros(0)


def nvfp4_304(latent, _):
    unit, codes, scales = token_scaled(latent)
    return raw(codes, scales, zeros(4), unit, zeros(8)), zeros(0)


def rope_back(data):
    return e4m3_value(data[304:]) * data[288:292].view(F32)


def index_fp8(key, _):
    scale = power(power_above(max(amax(key), F32(1e-4)) / F32(448)))
    return e4m3(key / scale), raw(F32(scale))


def index_mxfp4(key, _):
    floor = F32(6) * F32(2.0**-126)
    scales = [power_above(max(amax(g), floor) / F32(6)) for g in groups(key, 32)]
    codes = np.concatenate([e2m1(g / power(s)) for g, s in zip(groups(key, 32), scales)])
    return pack(codes), np.array(scales, np.uint8)


def index_mxfp4_back(data, scales):
    return (groups(e2m1_value(unpack(data)), 32) * power(scales)[:, None]).reshape(-1)


FORMATS = [
    # name, latent, rope, encode, decode
    ("bf16", 512, 64, bf16, bf16_back),
    ("e4m3", 512, 64, plain_e4m3, plain_e4m3_back),
    ("fp8_656", 512, 64, fp8, fp8_back),
    ("fp8_528", 512, 0, fp8, fp8_back),
    ("v4_584", 448, 64, v4, v4_back),
    ("v41_528", 512, 0, v41_528, v41_528_back),
    ("v41_288", 512, 0, v41_288, lambda d, _: fp4_back(d)),
    ("nvfp4_432", 512, 64, nvfp4_432, lambda d, _: np.concatenate([fp4_back(d), d[304:].view(BF16).astype(F32)])),
    ("nvfp4_368", 512, 64, nvfp4_368, lambda d, _: np.concatenate([fp4_back(d), rope_back(d)])),
    (
        "nvfp4_368t",
        512,
        64,
        nvfp4_368t,
        lambda d, _: np.concatenate([fp4_back(d, d[292:296].view(F32)), rope_back(d)]),
    ),
    ("nvfp4_304", 512, 0, nvfp4_304, lambda d, _: fp4_back(d, d[292:296].view(F32))),
    ("index_bf16_256", 128, 0, bf16, bf16_back),
    ("index_fp8_132", 128, 0, index_fp8, lambda d, s: e4m3_value(d) * s.view(F32)),
    ("index_mxfp4_68", 128, 0, index_mxfp4, index_mxfp4_back),
]


def make_tokens():
    """Numbers of many magnitudes, halfway cases, boundaries of scales, and everything odd."""
    tokens = rng.standard_normal((32, 576)).astype(F32)
    tokens *= np.array([1, 1e-3, 40, 1e-6, 1e4, 1, 1e-20, 1e30] * 4, F32)[:, None]
    # Each 16 of another magnitude, as outlier channels make them.
    tokens[8:12] *= np.exp2(rng.integers(-12, 12, (4, 36))).repeat(16, axis=1).astype(F32)
    tokens[12] = 0
    tokens[13] = -0.0
    tokens[14, :512] = 0
    tokens[15, 512:] = 0
    # Halfway between E2M1 codes and between E4M3 codes, where the scale is 1 or a power of two.
    halves = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6], F32)
    tokens[16] = np.tile(np.concatenate([halves, -halves]), 36)
    tokens[17] = tokens[16] * F32(448 / 6) / 64
    steps = (np.arange(576) % 256 - 128).astype(F32) / F32(512)
    tokens[18] = np.where(np.arange(576) % 32 == 0, 448, steps)
    # Just at, above and below where a scale takes the next power of two.
    for row, amax_ in ((19, 448), (20, 450), (21, 446), (22, 6), (23, 6.03125)):
        tokens[row] = np.clip(tokens[row], -1, 1)
        tokens[row, ::16] = amax_
    # Any bits: subnormals, infinities, NaN of either sign.
    bits = rng.integers(0, 1 << 16, (4, 576)).astype(np.uint16)
    tokens = tokens.astype(BF16)
    tokens[24:28] = bits.view(BF16)
    tokens[28, ::50] = np.inf
    tokens[28, 7::90] = -np.inf
    tokens[29, ::40] = np.nan
    tokens[30] = np.nan
    tokens[31] = np.array([1e-39, -1e-38, 3e-38, 0], F32).astype(BF16).repeat(144)
    return tokens


def main():
    tokens = make_tokens()
    every = np.arange(1 << 15, dtype=np.uint16).view(BF16).astype(F32)
    out = [raw(tokens), e4m3(every), e2m1(every)]
    for _, latent, rope, encode, decode in FORMATS:
        pairs = [(t[:latent], t[576 - rope :] if rope else t[:0]) for t in tokens]
        encoded = [encode(l if encode is bf16 else l.astype(F32), r) for l, r in pairs]
        for first in (0, 16):
            page = encoded[first : first + 16]
            out += [data for data, _ in page] + [scales for _, scales in page]
        data, scales = len(encoded[0][0]), len(encoded[0][1])
        strange = rng.integers(0, 256, (4, data + scales)).astype(np.uint8)
        out.append(strange.reshape(-1))
        out += [raw(decode(s[:data].copy(), s[data:].copy()).astype(F32)) for s in strange]
    pathlib.Path(__file__).with_name("golden.bin").write_bytes(np.concatenate(out).tobytes())


main()
