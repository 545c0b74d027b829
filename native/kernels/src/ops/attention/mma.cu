// Tiles of attention on tensor cores, after common.cu and cuda/include/mma.cu.
//   WIDTH, VALUE_WIDTH   the widths, rounded up to a multiple of 16
//   OTHER                rows of a tile of the other side
//   WARPS                warps per block

constexpr int THREADS = 32 * WARPS;
[[maybe_unused]] constexpr int OWN = 16 * TILES * WARPS;
// Rows in shared memory are an odd number of 16-byte units long, so that eight of them start at different banks, at
// every width; swizzled addresses would require powers of two.
#define LEADING (WIDTH + 8)
#define VALUE_LEADING (VALUE_WIDTH + 8)

// Writes half a row of a lane's sums.
template <int COLUMNS>
__device__ __forceinline__ void store_row(STORAGE* row, const Sums (&sums)[COLUMNS / 8], int half, float factor, int width) {
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; ++n) {
        int column = sum_column(n);
        float low = sums[n][2 * half] * factor, high = sums[n][2 * half + 1] * factor;
#if COPY
        if (column < width) *(unsigned*)(row + column) = pack(low, high);
#else
        if (column < width) narrow(low, row[column]);
        if (column + 1 < width) narrow(high, row[column + 1]);
#endif
    }
}
