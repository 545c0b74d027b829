// Warpgroup multiplications of compute capability 9: 64 rows in registers by 8 EIGHTS rows in shared memory. They own
// their registers until they are waited for, which the compiler does not know. So factors are pinned before them, and
// factors and products after them: the compiler then neither reuses those registers nor reads them early.

// Fence: registers have their values before the multiplications that follow.
__device__ __forceinline__ void multiplications() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Commits the multiplications issued since the last commit as one group.
__device__ __forceinline__ void grouped() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits for all groups but the latest LEFT.
template <int LEFT>
__device__ __forceinline__ void multiplied() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }

__device__ __forceinline__ void pinned(unsigned (&all)[4]) {
    asm volatile("" : "+r"(all[0]), "+r"(all[1]), "+r"(all[2]), "+r"(all[3])::"memory");
}
__device__ __forceinline__ void pinned(int (&all)[4]) {
    asm volatile("" : "+r"(all[0]), "+r"(all[1]), "+r"(all[2]), "+r"(all[3])::"memory");
}
__device__ __forceinline__ void pinned(float (&all)[4]) {
    asm volatile("" : "+f"(all[0]), "+f"(all[1]), "+f"(all[2]), "+f"(all[3])::"memory");
}
template <class T, int N>
__device__ __forceinline__ void pinned(T (&all)[N][4]) {
#pragma unroll
    for (int i = 0; i < N; i++) pinned(all[i]);
}

// The address part of a wgmma descriptor for rows of 16 bytes: eight contiguous rows, the next eight 256 bytes on. The
// shuffle tells the compiler that all lanes hold the same value. To advance by `d` bytes, add `d` / 16.
__device__ __forceinline__ unsigned eights(unsigned from) {
    // The bits above these select a block of the cluster.
    return __shfl_sync(0xffffffff, (from & 0x3ffff) / 16, 0);
}
// Like `eights`, where the other half of the columns follows each eight rows, at an offset of 128 bytes.
__device__ __forceinline__ unsigned matrices(unsigned from) { return eights(from) | 128 / 16 << 16; }
__device__ __forceinline__ unsigned long long described(unsigned rows) { return rows | 256ull / 16 << 32; }

#define FOUR_OF(c, i) c(to[i][0]), c(to[i][1]), c(to[i][2]), c(to[i][3])
// The predicate decides whether products are added to the previous sums. A constant "no" must stay hidden from the
// compiler: for fresh products it picks new registers each time, soon runs out of them, and then waits for every single
// multiplication. Grids have one row, so `ctaid.y` is 0.
#define MULTIPLY(kind, registers, compare, others, ...) \
    asm volatile("{ .reg .pred add; .reg .u32 row; mov.u32 row, %%ctaid.y; setp." compare ".u32 add, row, 0; " \
                 "wgmma.mma_async.sync.aligned." kind " " registers ", add" others "; }" \
                 : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows))
#define REGISTERS_1 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, %8"
#define REGISTERS_2 "{%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12"
#define REGISTERS_4 \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20"

#define OF_BYTES(compare) \
    static_assert(EIGHTS == 1 || EIGHTS == 2 || EIGHTS == 4, "eights of rows"); \
    if constexpr (EIGHTS == 1) MULTIPLY("m64n8k32.s32.s8.s8", REGISTERS_1, compare, "", FOUR_OF("+r", 0)); \
    if constexpr (EIGHTS == 2) \
        MULTIPLY("m64n16k32.s32.s8.s8", REGISTERS_2, compare, "", FOUR_OF("+r", 0), FOUR_OF("+r", EIGHTS - 1)); \
    if constexpr (EIGHTS == 4) \
        MULTIPLY("m64n32k32.s32.s8.s8", REGISTERS_4, compare, "", FOUR_OF("+r", 0), FOUR_OF("+r", EIGHTS / 4), \
                 FOUR_OF("+r", EIGHTS / 2), FOUR_OF("+r", EIGHTS - 1))

// Multiplies 32 bytes by 32 bytes, replacing the previous sums.
template <int EIGHTS>
__device__ __forceinline__ void multiply(int (&to)[EIGHTS][4], const unsigned (&a)[4], unsigned long long rows) {
    OF_BYTES("ne");
}

// Multiplies 32 bytes by 32 bytes, adding to the previous sums.
template <int EIGHTS>
__device__ __forceinline__ void multiply_add(int (&to)[EIGHTS][4], const unsigned (&a)[4], unsigned long long rows) {
    OF_BYTES("eq");
}

// Multiplies 16 halves by 16 halves, replacing the previous sums.
template <int EIGHTS>
__device__ __forceinline__ void multiply(float (&to)[EIGHTS][4], const unsigned (&a)[4], unsigned long long rows) {
    if constexpr (EIGHTS == 1) MULTIPLY("m64n8k16.f32.f16.f16", REGISTERS_1, "ne", ", 1, 1, 0", FOUR_OF("+f", 0));
    if constexpr (EIGHTS == 2)
        MULTIPLY("m64n16k16.f32.f16.f16", REGISTERS_2, "ne", ", 1, 1, 0", FOUR_OF("+f", 0), FOUR_OF("+f", EIGHTS - 1));
    if constexpr (EIGHTS == 4)
        MULTIPLY("m64n32k16.f32.f16.f16", REGISTERS_4, "ne", ", 1, 1, 0", FOUR_OF("+f", 0), FOUR_OF("+f", EIGHTS / 4),
               FOUR_OF("+f", EIGHTS / 2), FOUR_OF("+f", EIGHTS - 1));
}

#undef FOUR_OF
#undef OF_BYTES
#undef MULTIPLY
#undef REGISTERS_1
#undef REGISTERS_2
#undef REGISTERS_4
