// Tensor cores for 16-bit storage: products of 16 x 16 and 16 x 8 tiles by mma.sync.
//   TILES   16-row tiles per warp: the rows of sums that it accumulates
//   HALF    whether storage is f16, else bf16
//
// Of a 16 x 8 tile of sums a lane holds the columns 2 (lane % 4) and 2 (lane % 4) + 1, of the rows r and r + 8 with r =
// lane / 4. Two such tiles side by side, rounded, have the layout of one left operand: weights go from sums to operands
// without leaving the registers.

typedef float Sums[4];
typedef unsigned Left[4];

__device__ __forceinline__ void multiply_add(Sums& sums, const Left& a, unsigned b0, unsigned b1) {
#if HALF
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Loads four 8 x 8 tiles (ldmatrix); eight lanes give the row addresses of each.
__device__ __forceinline__ void load_tiles(unsigned (&to)[4], unsigned at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ void load_turned_tiles(unsigned (&to)[4], unsigned at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(at) : "memory");
}

// Two values rounded to storage, the first in the lower half.
__device__ __forceinline__ unsigned pack(float low, float high) {
    unsigned packed;
#if HALF
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#endif
    return packed;
}

// The address that a lane gives to ldmatrix: for a left operand that begins at `first`; for a right operand of two
// 8-column tiles, stored transposed; and for one stored as it is, to be transposed by the load.
template <int APART>
__device__ __forceinline__ unsigned left_at(const STORAGE* first) {
    int lane = threadIdx.x % 32;
    return address(first + lane % 16 * APART + lane / 16 * 8);
}
template <int APART>
__device__ __forceinline__ unsigned right_at(const STORAGE* first) {
    int lane = threadIdx.x % 32;
    return address(first + (lane % 8 + lane / 16 * 8) * APART + lane / 8 % 2 * 8);
}
template <int APART>
__device__ __forceinline__ unsigned turned_at(const STORAGE* first) {
    return left_at<APART>(first);
}

// s += a b', TILES of 16 rows by COLUMNS; `a` and `b` are a lane's addresses from left_at and right_at.
template <int COLUMNS, int INNER, int APART>
__device__ __forceinline__ void add_products(Sums (&s)[TILES][COLUMNS / 8], unsigned a, unsigned b) {
#pragma unroll
    for (int d = 0; d < INNER; d += 16) {
        Left left[TILES];
#pragma unroll
        for (int m = 0; m < TILES; ++m) load_tiles(left[m], a + 2 * (16 * m * APART + d));
#pragma unroll
        for (int n = 0; n < COLUMNS; n += 16) {
            unsigned right[4];
            load_tiles(right, b + 2 * (n * APART + d));
#pragma unroll
            for (int m = 0; m < TILES; ++m) {
                multiply_add(s[m][n / 8], left[m], right[0], right[1]);
                multiply_add(s[m][n / 8 + 1], left[m], right[2], right[3]);
            }
        }
    }
}

// to += x b, where x are rounded sums and b has INNER rows of COLUMNS; `b` is a lane's address from turned_at.
template <int COLUMNS, int INNER, int APART>
__device__ __forceinline__ void add_weighted(Sums (&to)[TILES][COLUMNS / 8], const Left (&x)[TILES][INNER / 16], unsigned b) {
#pragma unroll
    for (int k = 0; k < INNER; k += 16)
#pragma unroll
        for (int n = 0; n < COLUMNS; n += 16) {
            unsigned right[4];
            load_turned_tiles(right, b + 2 * (k * APART + n));
#pragma unroll
            for (int m = 0; m < TILES; ++m) {
                multiply_add(to[m][n / 8], x[m][k / 16], right[0], right[1]);
                multiply_add(to[m][n / 8 + 1], x[m][k / 16], right[2], right[3]);
            }
        }
}

// Rounds sums to left operands.
template <int COLUMNS>
__device__ __forceinline__ void round(Left (&to)[TILES][COLUMNS / 16], const Sums (&from)[TILES][COLUMNS / 8]) {
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int n = 0; n < COLUMNS / 16; ++n) {
            const Sums &first = from[m][2 * n], &second = from[m][2 * n + 1];
            to[m][n][0] = pack(first[0], first[1]);
            to[m][n][1] = pack(first[2], first[3]);
            to[m][n][2] = pack(second[0], second[1]);
            to[m][n][3] = pack(second[2], second[3]);
        }
}

template <int COLUMNS>
__device__ __forceinline__ void clear(Sums (&s)[TILES][COLUMNS]) {
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[m][n][e] = 0;
}

// The row, among a warp's rows, of the elements 0 and 1 (half 0) or 2 and 3 (half 1) of a tile, and the column of the
// elements 0 and 2.
__device__ __forceinline__ int sum_row(int m, int half) { return 16 * m + threadIdx.x % 32 / 4 + 8 * half; }
__device__ __forceinline__ int sum_column(int n) { return 8 * n + threadIdx.x % 4 * 2; }
