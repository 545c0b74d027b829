// The bits of half-precision numbers, and their values read back.

extern "C" __global__ void f16_convert(Halves p) {
    i64 at = blockIdx.x * (i64)blockDim.x + threadIdx.x;
    if (at >= p.count) return;
    float x = p.x[at];
    f16 half;
    narrow(x, half);
    // NaN keeps its sign and the bits that fit, as on CPUs.
    unsigned bits = __float_as_uint(x);
    if (x != x) half.bits = bits >> 16 & 0x8000 | 0x7e00 | bits >> 13 & 0x3ff;
    p.bits[at] = half.bits;
    p.back[at] = widen(half);
}
