// The scans' memory accesses. scans.cu describes the order and the macros.

// Loads VEC neighbouring channels, as vectors of at most 16 bytes.
template <class T>
__device__ __forceinline__ void load(const T* from, REAL (&to)[VEC]) {
    constexpr int EACH = VEC * sizeof(T) > 16 ? 16 / sizeof(T) : VEC;
    struct alignas(EACH * sizeof(T)) Pack { T of[EACH]; };
#pragma unroll
    for (int v = 0; v < VEC; v += EACH) {
        Pack pack = *(const Pack*)(from + v);
#pragma unroll
        for (int e = 0; e < EACH; ++e) to[v + e] = widen(pack.of[e]);
    }
}

template <class T>
__device__ __forceinline__ void store(const REAL (&from)[VEC], T* to) {
    constexpr int EACH = VEC * sizeof(T) > 16 ? 16 / sizeof(T) : VEC;
    struct alignas(EACH * sizeof(T)) Pack { T of[EACH]; };
#pragma unroll
    for (int v = 0; v < VEC; v += EACH) {
        Pack pack;
#pragma unroll
        for (int e = 0; e < EACH; ++e) narrow(from[v + e], pack.of[e]);
        *(Pack*)(to + v) = pack;
    }
}

// Stores to global memory as vectors of 8 or 16 bytes; the compiler would store element by element.
template <class T>
__device__ __forceinline__ void store_far(const REAL (&from)[VEC], T* to) {
    constexpr int BYTES = VEC * sizeof(T);
    if constexpr (BYTES % 8 == 0) {
        T all[VEC];
        u64 words[BYTES / 8];
#pragma unroll
        for (int v = 0; v < VEC; ++v) narrow(from[v], all[v]);
        memcpy(words, all, BYTES);
        if constexpr (BYTES == 8)
            *(u64*)to = words[0];
        else
#pragma unroll
            for (int w = 0; w < BYTES / 8; w += 2)
                asm volatile("st.global.v2.b64 [%0], {%1, %2};"
                             ::"l"((u64*)to + w), "l"(words[w]), "l"(words[w + 1]) : "memory");
    } else {
        store(from, to);
    }
}

// The position of a thread: its row, its first channel and the first step of its tile.
struct Place {
    i64 row, channel, step;
    bool inside;
    // The offset of that step, and the stride to the next step.
    i64 here, further;
};

// The scan's result before its first step, which the gradient reads.
__device__ __forceinline__ REAL first(const Params& p, const Place& at, int v) {
    REAL given = p.first ? p.first[at.row * p.width + at.channel + v] : (REAL)0;
#if SCAN == PRODUCT
    return p.first ? given : (REAL)1;
#elif SCAN == EXP_PRODUCT
    return p.first ? exponential(given) : (REAL)1;
#else
    return p.first ? given : -(REAL)(1.0f / 0.0f);
#endif
}

// Threads of a column, at successive times; channels of a tile; steps of a tile; warps of a block.
constexpr int AT_ONCE = THREADS / COLS, CHANNELS = COLS * VEC, STEPS = AT_ONCE * ROWS, WARPS = THREADS / 32;
static_assert(CHANNELS <= THREADS, "each channel has a thread that exchanges totals");

// Prefetched inputs are staged in shared memory. Without OWN, results overwrite them there before they are copied to
// global memory; with OWN, threads store results to global memory directly.
#if SCAN == EXP_PRODUCT || SCAN == LOG_SUM_EXP && GRADIENT
typedef REAL Widest;
#else
typedef Y Widest;
#endif
constexpr int PLACE = VEC * sizeof(Widest), WRITES = SCAN == EXP_PRODUCT && !GRADIENT && !OWN ? 2 : 1;
constexpr int TENSORS = READS > WRITES ? READS : WRITES;
constexpr int TENSOR = STEPS * COLS * PLACE, STAGE = TENSORS * TENSOR;
// Swizzle: threads that read their own ROWS steps would cause bank conflicts, so a step is XORed with its thread's
// number modulo ORDERS. APART steps span all banks.
constexpr int APART = 128 / (COLS * PLACE), ORDERS = APART < 1 ? 1 : APART < ROWS ? APART : ROWS;

extern __shared__ __align__(16) unsigned char stages[];

// The address of the thread's channels of tensor `k` at step `step` of a tile.
__device__ __forceinline__ unsigned char* there(int stage, int step, int k) {
    int place = (step ^ step / ROWS % ORDERS) * COLS + threadIdx.x % COLS;
    return stages + stage * STAGE + k * TENSOR + place * PLACE;
}

// The `r`th step that a thread computes, and the `r`th that it copies. With OWN both are the same, as the tile's
// channels fill a memory sector. Else copies go along memory for coalescing, whichever thread uses the data.
__device__ __forceinline__ int computed(int r) { return threadIdx.x / COLS * ROWS + r; }
__device__ __forceinline__ int copied(int r) { return OWN ? computed(r) : r * AT_ONCE + threadIdx.x / COLS; }

__device__ __forceinline__ void all_threads_copied() {
    if (!OWN) __syncthreads();
}

// Queues the asynchronous copy of a thread's VEC channels; `arrived` waits for it.
template <class T>
__device__ __forceinline__ void ask(const T* from, unsigned char* to) {
    constexpr int BYTES = VEC * sizeof(T), EACH = BYTES > 16 ? 16 : BYTES;
#if __CUDA_ARCH__ >= 800
    if constexpr (EACH >= 4) {
#pragma unroll
        for (int b = 0; b < BYTES; b += EACH) {
            unsigned there = address(to + b);
            const char* here = (const char*)from + b;
            if constexpr (EACH == 16)
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(there), "l"(here) : "memory");
            else
                asm volatile("cp.async.ca.shared.global [%0], [%1], %2;"
                             ::"r"(there), "l"(here), "n"(EACH) : "memory");
        }
        return;
    }
#endif
    memcpy(to, from, BYTES);
}

// `asked` commits a tile's copies as one group; `arrived` waits for all groups but those of the STAGES - 1 tiles ahead.
__device__ __forceinline__ void asked() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

__device__ __forceinline__ void arrived() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
#endif
}

// Queues the copies of a step. `FULL`: all the tile's steps, and the one after them, are within the length.
template <bool FULL>
__device__ __forceinline__ void ask(const Params& p, const Place& at, int stage, int step) {
    i64 here = at.here + step * at.further;
#if !GRADIENT
    ask(p.x + here, there(stage, step, 0));
#elif SCAN == SUM
    ask(p.dy + here, there(stage, step, 0));
#else
    bool follows = FULL || at.step + step + 1 < p.length;
    ask(p.x + here, there(stage, step, 0));
    ask(p.dy + here, there(stage, step, 1));
#if SCAN == PRODUCT
    if (follows) ask(p.y + here + at.further, there(stage, step, 2));
#elif SCAN == EXP_PRODUCT
    if (p.dlog_y) ask(p.dlog_y + here, there(stage, step, 2));
    if (follows) ask(p.y + here + at.further, there(stage, step, 3));
#else
    ask(p.wide_y + here, there(stage, step, 2));
    if (follows) ask(p.wide_y + here + at.further, there(stage, step, 3));
#endif
#endif
}

// The scan's result before a step, for the gradient. It walks in reverse, so this is the result of its next step.
template <class T, bool FULL>
__device__ __forceinline__ void before(const Params& p, const Place& at, int step, const void* y, REAL (&to)[VEC]) {
    if (FULL || at.step + step + 1 < p.length) return load((const T*)y, to);
#pragma unroll
    for (int v = 0; v < VEC; ++v) to[v] = first(p, at, v);
}

// The inputs of a step, for each of its channels.
template <bool FULL>
__device__ __forceinline__ void read(const Params& p, const Place& at, int stage, int step,
                                     REAL (&to)[READS][VEC]) {
    load((const STORAGE*)there(stage, step, 0), to[0]);
#if GRADIENT && SCAN != SUM
    load((const STORAGE*)there(stage, step, 1), to[1]);
#if SCAN == PRODUCT
    before<STORAGE, FULL>(p, at, step, there(stage, step, 2), to[2]);
#elif SCAN == EXP_PRODUCT
    if (p.dlog_y) {
        load((const REAL*)there(stage, step, 2), to[2]);
    } else {
#pragma unroll
        for (int v = 0; v < VEC; ++v) to[2][v] = 0;
    }
    before<STORAGE, FULL>(p, at, step, there(stage, step, 3), to[3]);
#else
    load((const REAL*)there(stage, step, 2), to[2]);
    before<REAL, FULL>(p, at, step, there(stage, step, 3), to[3]);
#endif
#endif
}

// Reads a step for the first time. Logarithms replace the staged inputs, so that `read_again` need not compute them.
template <bool FULL>
__device__ __forceinline__ void read_first(const Params& p, const Place& at, int stage, int step,
                                           REAL (&to)[READS][VEC]) {
    read<FULL>(p, at, stage, step, to);
#if SCAN == EXP_PRODUCT && !GRADIENT
#pragma unroll
    for (int v = 0; v < VEC; ++v) {
        REAL log = logarithm(bounded(to[0][v], p.eps, 1));
        to[0][v] = log < (REAL)p.log_min ? (REAL)p.log_min : log;
    }
    store(to[0], (REAL*)there(stage, step, 0));
#endif
}

template <bool FULL>
__device__ __forceinline__ void read_again(const Params& p, const Place& at, int stage, int step,
                                           REAL (&to)[READS][VEC]) {
#if SCAN == EXP_PRODUCT && !GRADIENT
    load((const REAL*)there(stage, step, 0), to[0]);
#else
    read<FULL>(p, at, stage, step, to);
#endif
}
