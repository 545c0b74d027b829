// Rows of x as products read them: a warp a block of a row, a lane a value. The host gives WAY:
//   0   Q8_0 for walks: of 32 neighbouring blocks the first halves, then the second ones, 16 bytes each, so that lanes that
//       have a block each read neighbours; and for each block its scale, and what its sums start from
//   1   Q8_0 for tiles: of 8 rows the words of a block in the order of the lanes that multiply them; and for each row the
//       scale and what takes the float that sums start from away again. The blocks of NT such eights stand together
//   2   floats for walks: of 32 neighbouring blocks the first values, then the second ones, and so on

constexpr unsigned ALL = 0xffffffff;

struct Params {
    const STORAGE* x;
    unsigned char* values;
    unsigned char* scales;
    i64 rows, padded, blocks;
    int offset;  // by how much weights are too large
};

// A float whose last bit is worth 1, so that its bits with an integer added are those of their sum.
constexpr float START = 12582912;

extern "C" __global__ void blocks_rows(Params p) {
#if __CUDA_ARCH__ >= 900
    // The products may begin to fetch weights.
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    i64 warp = (blockIdx.x * (i64)blockDim.x + threadIdx.x) / 32;
    int lane = threadIdx.x % 32;
    i64 row = warp / p.blocks, block = warp % p.blocks;
    if (row >= p.padded) return;
    float x = row < p.rows ? (float)widen(p.x[(row * p.blocks + block) * 32 + lane]) : 0;
    i64 chunks = (p.blocks + 31) / 32, chunk = row * chunks + block / 32;
    if (WAY == 2) {
        ((float*)p.values)[(chunk * 32 + lane) * 32 + block % 32] = x;
        return;
    }
    unsigned most = __float_as_uint(x) & 0x7fffffff;
    int sum;
    for (int step = 16; step > 0; step /= 2) most = max(most, __shfl_xor_sync(ALL, most, step));
    float d = __fdiv_rn(__uint_as_float(most), 127), id = d == 0 ? 0 : __fdiv_rn(1, d);
    float v = __fmul_rn(x, id), r = __fadd_rn(v, copysignf(0.49999997f, v));
    // NaN becomes 0, with a scale that is NaN.
    int q = sum = (int)(r < -127 ? -127 : r > 127 ? 127 : r);
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(ALL, sum, step);
    f16 half;
    narrow(d, half);
    float scale = widen(half);
    if (WAY == 0) {
        p.values[((chunk * 2 + lane / 16) * 32 + block % 32) * 16 + lane % 16] = q;
        if (lane == 0) ((int2*)p.scales)[chunk * 32 + block % 32] = {__float_as_int(scale), -p.offset * sum};
    } else {
        i64 group = (row / 8 / NT * p.blocks + block) * NT + row / 8 % NT;
        int word = lane / 4;
        p.values[((group * 32 + row % 8 * 4 + word % 4) * 2 + word / 4) * 4 + lane % 4] = q;
        if (lane == 0) ((float2*)p.scales)[group * 8 + row % 8] = {scale, -START * scale};
    }
}
