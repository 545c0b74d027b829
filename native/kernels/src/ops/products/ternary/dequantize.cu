// Multiplies ternary numbers in planes by their scale. A thread writes one number.

extern "C" __global__ void dequantize_ternary(Params p) {
    i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= p.rows * p.n) return;
    i64 row = at / p.n, i = at % p.n, byte = row * ((p.n + 7) / 8) + i / 8;
    int value = (p.plane0[byte] >> (i % 8) & 1) - (p.plane1[byte] >> (i % 8) & 1);
    float scale = p.scale[p.per_row ? row : 0];
    // Not a product: a zero stays 0 even where the scale is not finite.
    p.w[at] = value == 0 ? 0.0f : value > 0 ? scale : -scale;
}
