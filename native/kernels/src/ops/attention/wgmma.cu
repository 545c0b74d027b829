// Hopper's tensor cores, after common.cu and mma.cu: asynchronous products of 64 rows per warpgroup, by wgmma. Sums and
// left operands in registers have the layouts of mma.sync with TILES 1.
//
// In shared memory a tile consists of blocks of 64 columns. A row of a block is 128 bytes, whose 16-byte units are
// swizzled: unit u of row r is stored at u ^ r % 8. A tile begins at a multiple of 1024 bytes. As an operand it is
// transposed in products, and not in weighted sums.

typedef unsigned long long u64;

#if HALF
#define TYPES "f32.f16.f16"
#else
#define TYPES "f32.bf16.bf16"
#endif

#define SUMS(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define SUMS_64 SUMS(0), SUMS(1), SUMS(2), SUMS(3), SUMS(4), SUMS(5), SUMS(6), SUMS(7)
#define SUMS_128 SUMS_64, SUMS(8), SUMS(9), SUMS(10), SUMS(11), SUMS(12), SUMS(13), SUMS(14), SUMS(15)
#define NAMES_64                                                                                              \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27," \
    "%28,%29,%30,%31"
#define NAMES_128                                                                                              \
    NAMES_64 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55," \
             "%56,%57,%58,%59,%60,%61,%62,%63"

// d += a b', or d = a b' if `more` is 0: both operands in shared memory, 16 columns each.
__device__ __forceinline__ void multiply_add(Sums (&d)[8], u64 a, u64 b, int more) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16." TYPES " {" NAMES_64 "}, %32, %33, p, 1, 1, 0, 0;\n}"
                 : SUMS_64 : "l"(a), "l"(b), "r"(more));
}
__device__ __forceinline__ void multiply_add(Sums (&d)[16], u64 a, u64 b, int more) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16." TYPES " {" NAMES_128 "}, %64, %65, p, 1, 1, 0, 0;\n}"
                 : SUMS_128 : "l"(a), "l"(b), "r"(more));
}

// d += x b: x in registers, b 16 rows in shared memory.
__device__ __forceinline__ void multiply_add(Sums (&d)[8], const Left& x, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16." TYPES " {" NAMES_64 "}, {%32,%33,%34,%35}, %36, 1, 1, 1, 1;"
                 : SUMS_64 : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "l"(b));
}
__device__ __forceinline__ void multiply_add(Sums (&d)[16], const Left& x, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16." TYPES " {" NAMES_128 "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"
                 : SUMS_128 : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "l"(b));
}

// d += a b, or d = a b if `more` is 0: a is stored transposed; both in shared memory, 16 rows each.
__device__ __forceinline__ void multiply_add_turned(Sums (&d)[8], u64 a, u64 b, int more) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16." TYPES " {" NAMES_64 "}, %32, %33, p, 1, 1, 1, 1;\n}"
                 : SUMS_64 : "l"(a), "l"(b), "r"(more));
}

// Orders earlier accesses to registers before the products that follow. From here to `settle`, registers of products in
// flight must not be touched.
__device__ __forceinline__ void registers_ready() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most LEFT groups of products are in flight.
template <int LEFT>
__device__ __forceinline__ void settle() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// Makes the compiler assume that these registers change here.
template <int COLUMNS>
__device__ __forceinline__ void touch(Sums (&s)[TILES][COLUMNS]) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(s[0][n][e])::"memory");
}
template <int COLUMNS>
__device__ __forceinline__ void touch(Left (&x)[TILES][COLUMNS]) {
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) asm volatile("" : "+r"(x[0][n][e])::"memory");
}

// The varying half of the descriptor of a swizzled tile: its address, and the bytes between blocks of 64 columns. A part
// of the tile that begins `d` bytes on has a half that is larger by `d` / 16.
__device__ __forceinline__ unsigned half_described(unsigned at, unsigned block) {
    return (at >> 4 & 0x3fff) | block >> 4 << 16;
}

// The descriptor; groups of 8 rows are 1024 bytes apart.
__device__ __forceinline__ u64 described(unsigned half) { return half | (u64)(1024 >> 4 | 1 << 30) << 32; }

// Makes the copies that each thread has waited for visible to the tensor cores, and synchronizes the block.
__device__ __forceinline__ void all_arrived() {
    wait_groups<0>();
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
}

// Queues copies of a tile of TALL rows and BROAD columns.
template <int TALL, int BROAD>
__device__ __forceinline__ void fetch_swizzled(STORAGE* to, const Matrix& from, int row) {
    constexpr int UNITS = BROAD / 8;
#pragma unroll
    for (int first = 0; first < TALL * UNITS; first += THREADS) {
        int unit = first + threadIdx.x;
        if (TALL * UNITS % THREADS && unit >= TALL * UNITS) break;
        int r = unit / UNITS, c = unit % UNITS;
        bool there = row + r < from.rows && 8 * c < from.width;
        const STORAGE* at = from.first + (there ? (row + r) * from.stride + 8 * c : 0);
        copy_or_zero(shared_address(to) + c / 8 * TALL * 128 + r * 128 + (c % 8 ^ r % 8) * 16, at, there);
    }
}

// s = a b', or s += a b' if ADD: 64 of TALL rows of a by COLUMNS rows of b, over INNER columns; a and b are shared-memory
// addresses.
template <int TALL, int COLUMNS, int INNER, bool ADD = false>
__device__ __forceinline__ void start_products(Sums (&s)[TILES][COLUMNS / 8], unsigned a, unsigned b) {
    unsigned left = half_described(a, 16), right = half_described(b, 16);
    registers_ready();
#pragma unroll
    for (int d = 0; d < INNER; d += 16)
        multiply_add(s[0], described(left + d / 64 * TALL * 8 + d % 64 / 8), described(right + d / 64 * COLUMNS * 8 + d % 64 / 8),
                     ADD || d);
    end_products();
}

// The same of the warpgroup's rows of a.
template <int TALL, int COLUMNS, int INNER>
__device__ __forceinline__ void start_products(Sums (&s)[TILES][COLUMNS / 8], const STORAGE* a, const STORAGE* b) {
    unsigned own = shared_address(a) + threadIdx.x / 128 * 64 * 128;
    start_products<TALL, COLUMNS, INNER>(s, own, shared_address(b));
}

// to += x b, where b has INNER rows of COLUMNS.
template <int COLUMNS, int INNER>
__device__ __forceinline__ void start_weighted(Sums (&to)[TILES][COLUMNS / 8], const Left (&x)[TILES][INNER / 16], unsigned b) {
    unsigned right = half_described(b, INNER * 128);
    registers_ready();
#pragma unroll
    for (int k = 0; k < INNER; k += 16) multiply_add(to[0], x[0][k / 16], described(right + k * 8));
    end_products();
}
template <int COLUMNS, int INNER>
__device__ __forceinline__ void start_weighted(Sums (&to)[TILES][COLUMNS / 8], const Left (&x)[TILES][INNER / 16],
                                               const STORAGE* b) {
    start_weighted<COLUMNS, INNER>(to, x, shared_address(b));
}
