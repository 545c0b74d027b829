// Shared by all kernels of attention. The formulas are in mod.rs; cuda.rs fills the parameters.
//   CAUSAL   whether there is a causal mask
//   COPY     bytes per asynchronous copy to shared memory; 0 if copies must be synchronous
//   PACKED   whether the batch consists of packed sequences

// One head of a tensor, as a row-major matrix.
struct Matrix {
    const STORAGE* first;
    i64 stride;
    int rows, width;
};

__device__ __forceinline__ i64 start(const At& at, int batch, int head) {
    return batch * at.batch + head * at.head;
}

__device__ __forceinline__ int least(int a, int b) { return a < b ? a : b; }
__device__ __forceinline__ int most(int a, int b) { return a > b ? a : b; }
__device__ __forceinline__ REAL largest(REAL a, REAL b) { return a > b ? a : b; }

// The score of a masked key: minus infinity.
__device__ __forceinline__ REAL hidden() { return (REAL)__int_as_float(0xff800000); }

// The number of keys that are visible to a query by causality; they are the first ones.
__device__ __forceinline__ int visible(const Params& p, int query) {
#if CAUSAL
    return most(0, least(query + p.offset + 1, p.keys));
#else
    return p.keys;
#endif
}

// The first query to which a key is visible.
__device__ __forceinline__ int first_seeing(const Params& p, int key) {
#if CAUSAL
    return most(0, least(key - p.offset, p.queries));
#else
    return 0;
#endif
}

// The work of a block. The blocks of `together` heads are interleaved tile by tile, tiles with the most work first:
// tensors that several of them read stay in the cache, and the longest blocks do not start last.
struct Place { int tile, batch, head; };

#if PACKED
// A packed sequence is a call of its own: `p` becomes that of the block's sequence. All heads read its keys together.
__device__ __forceinline__ Place place(Params& p, unsigned block, int heads, bool) {
    const int* piece = p.pieces + 3 * (block / heads);
    i64 first = piece[0];
    p.queries = p.keys = piece[1];
    p.q += first * p.q_at.row, p.dq += first * p.q_at.row;
    p.k += first * p.k_at.row, p.dk += first * p.k_at.row;
    p.v += first * p.v_at.row, p.dv += first * p.v_at.row;
    p.dy += first * p.y_at.row, p.to += first * p.y_at.row;
    p.to_lse += first, p.shift += first, p.delta += first;
    return {piece[2], 0, (int)(block % heads)};
}
#else
__device__ __forceinline__ Place place(const Params& p, unsigned block, int heads, bool from_last) {
    unsigned group = (unsigned)p.together * p.tiles, first = block / group * p.together;
    unsigned here = least(p.together, p.batch * heads - first), in_group = block % group;
    unsigned tile = in_group / here, row = first + in_group % here;
    return {(int)(from_last ? p.tiles - 1 - tile : tile), (int)(row / heads), (int)(row % heads)};
}
#endif

// The index of a query's statistics: its lse, the shift of its scores, and delta.
__device__ __forceinline__ i64 statistics(const Params& p, int batch, int head, int query) {
    return ((i64)batch * p.heads + head) * p.all_queries + query;
}

__device__ __forceinline__ unsigned shared_address(const void* generic) {
    unsigned long long address;
    asm("cvta.to.shared.u64 %0, %1;" : "=l"(address) : "l"(generic));
    return (unsigned)address;
}

// Queues an asynchronous copy of COPY bytes into shared memory, or of zeros.
__device__ __forceinline__ void copy_or_zero(unsigned to, const void* from, bool there) {
#if COPY == 16
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
#elif COPY
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(COPY), "r"(there ? COPY : 0)
                 : "memory");
#endif
}

// Commits the queued copies as a group; waits until at most LEFT groups are in flight.
__device__ __forceinline__ void end_group() {
#if COPY
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int LEFT>
__device__ __forceinline__ void wait_groups() {
#if COPY
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
#endif
}

// Copies one element, widened if shared memory holds the type of the arithmetic.
template <typename T>
__device__ __forceinline__ void put(T& to, const STORAGE* from, bool there) {
    T zero = {};
    to = there ? (T)(*from) : zero;
}
__device__ __forceinline__ void put(REAL& to, const STORAGE* from, bool there) { to = there ? widen(*from) : (REAL)0; }

// Queues copies of TALL rows and BROAD columns, from (row, column) on, into shared memory with a row stride of APART
// elements. Elements outside of the matrix become zeros. CREW adjacent threads share the work.
template <int TALL, int BROAD, int APART, int CREW, typename T>
__device__ __forceinline__ void fetch(T* to, const Matrix& from, int row, int column) {
#if COPY
    constexpr int EACH = COPY / sizeof(STORAGE), UNITS = BROAD / EACH;
#pragma unroll
    for (int first = 0; first < TALL * UNITS; first += CREW) {
        int unit = first + threadIdx.x % CREW;
        if (TALL * UNITS % CREW && unit >= TALL * UNITS) break;
        int r = unit / UNITS, c = unit % UNITS * EACH;
        bool there = row + r < from.rows && column + c < from.width;
        const STORAGE* at = from.first + (there ? (row + r) * from.stride + column + c : 0);
        copy_or_zero(shared_address(to + r * APART + c), at, there);
    }
#else
#pragma unroll 8
    for (int unit = threadIdx.x % CREW; unit < TALL * BROAD; unit += CREW) {
        int r = unit / BROAD, c = unit % BROAD;
        bool there = row + r < from.rows && column + c < from.width;
        put(to[r * APART + c], from.first + ((row + r) * from.stride + column + c), there);
    }
#endif
}
