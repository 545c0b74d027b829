// Converts ternary cells from layout FROM to layout TO; with COUNTS as TO it only counts values. A thread handles one
// byte of the target: 8 cells of a row, 4 of them, 4 rows of a column, or one cell. The host numbers the layouts.

// -1, 0 or 1; 2 for a sentinel.
__device__ __forceinline__ int of_bits(int bit0, int bit1) { return bit0 & bit1 ? 2 : bit0 - bit1; }

__device__ __forceinline__ int cell(const Cells& p, i64 row, i64 i) {
#if FROM == VALUES
    int value = (signed char)p.from[0][row * p.n + i];
    return value < -1 || value > 1 ? 2 : value;
#elif FROM == PLANES
    i64 at = row * ((p.n + 7) / 8) + i / 8;
    return of_bits(p.from[0][at] >> (i % 8) & 1, p.from[1][at] >> (i % 8) & 1);
#elif FROM == PACKED2
    int code = p.from[0][row * ((p.n + 3) / 4) + i / 4] >> (2 * (i % 4)) & 3;
    return of_bits(code >> 1, code & 1);
#elif FROM == OFFSETROWS
    i64 quarter = (p.rows + 3) / 4;
    return (p.from[0][row % quarter * p.n + i] >> (2 * (row / quarter)) & 3) - 1;
#else
    int bit0 = p.from[0][row * p.n + i], bit1 = p.from[1][row * p.n + i];
    return bit0 > 1 || bit1 > 1 ? 2 : of_bits(bit0, bit1);
#endif
}

// The cell's value. A sentinel is recorded and reads as 0.
__device__ __forceinline__ int cleared(const Cells& p, i64 row, i64 i) {
    int value = cell(p, row, i);
    if (value != 2) return value;
    atomicAdd(p.sentinels, 1);
    atomicMin(p.first, (unsigned long long)(row * p.n + i));
    return 0;
}

extern "C" __global__ void ternary_cells(Cells p) {
    constexpr int CELLS = TO == PLANES || TO == COUNTS ? 8 : TO == PACKED2 ? 4 : 1;
    i64 wide = (p.n + CELLS - 1) / CELLS, high = TO == OFFSETROWS ? (p.rows + 3) / 4 : p.rows;
    i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    bool inside = at < wide * high;
#if TO != COUNTS
    if (!inside) return;
#endif
    i64 row = inside ? at / wide : 0, begin = inside ? at % wide * CELLS : 0;
    [[maybe_unused]] i64 end = !inside ? 0 : begin + CELLS < p.n ? begin + CELLS : p.n;
#if TO == VALUES
    p.to[0][at] = (unsigned char)cleared(p, row, begin);
#elif TO == PLANES
    int plane0 = 0, plane1 = 0;
    for (i64 i = begin; i < end; i++) {
        int value = cleared(p, row, i);
        plane0 |= (value == 1) << (i - begin);
        plane1 |= (value == -1) << (i - begin);
    }
    p.to[0][at] = plane0;
    p.to[1][at] = plane1;
#elif TO == PACKED2
    int codes = 0;
    for (i64 i = begin; i < end; i++) {
        int value = cleared(p, row, i);
        codes |= (value == 1 ? 2 : value == -1) << (2 * (i - begin));
    }
    p.to[0][at] = codes;
#elif TO == OFFSETROWS
    int codes = 0;
    for (int i = 0; i < 4 && row + i * high < p.rows; i++) codes |= (cleared(p, row + i * high, begin) + 1) << (2 * i);
    p.to[0][at] = codes;
#elif TO == BYTEPLANES
    int value = cleared(p, row, begin);
    p.to[0][at] = value == 1;
    p.to[1][at] = value == -1;
#else
    int counts[4] = {0, 0, 0, 0};
    for (i64 i = begin; i < end; i++) {
        int value = cell(p, row, i);
        counts[value + 1]++;
        if (value == 2) atomicMin(p.first, (unsigned long long)(row * p.n + i));
    }
    for (int value = 0; value < 4; value++) {
        int count = counts[value];
        for (int step = 16; step > 0; step /= 2) count += __shfl_xor_sync(0xffffffff, count, step);
        if (threadIdx.x % 32 == 0 && count > 0) atomicAdd(p.counts + value, (unsigned long long)count);
    }
#endif
}
