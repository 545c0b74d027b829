// How all of them go through memory: scans.cu says in which order and what the macros are.

// VEC neighbours at once, as far as the type allows it.
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

// The same into memory, at once: the compiler itself would store piece by piece there.
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

// Where a thread stands: its row, its first channel and the first step of its tile.
struct Place {
    i64 row, channel, step;
    bool inside;
    // Where that step lies, and how much further the next one.
    i64 here, further;
};

// What comes before the first step of the scan, as a gradient sees it.
__device__ __forceinline__ REAL first(const Params& p, const Place& at, int v) {
    REAL given = p.first ? p.first[at.row * p.width + at.channel + v] : (REAL)0;
#if SCAN == 0
    return p.first ? given : (REAL)1;
#elif SCAN == 1
    return p.first ? exponential(given) : (REAL)1;
#else
    return p.first ? given : -(REAL)(1.0f / 0.0f);
#endif
}

// Threads of a column, one after another in time; channels of a tile; steps of a tile; warps of a block.
constexpr int AT_ONCE = THREADS / COLS, CHANNELS = COLS * VEC, STEPS = AT_ONCE * ROWS, WARPS = THREADS / 32;
static_assert(CHANNELS <= THREADS, "each channel has a thread that exchanges totals");

// What a block reads ahead lies in shared memory. Unless each thread reads what it uses itself and writes it straight
// to memory, results take the place of what is read.
#if SCAN == 1 || SCAN == 3 && GRADIENT
typedef REAL Widest;
#else
typedef Y Widest;
#endif
constexpr int PLACE = VEC * sizeof(Widest), WRITES = SCAN == 1 && !GRADIENT && !OWN ? 2 : 1;
constexpr int TENSORS = READS > WRITES ? READS : WRITES;
constexpr int TENSOR = STEPS * COLS * PLACE, STAGE = TENSORS * TENSOR;
// Threads of which each reads its own steps would find them in the same banks: so many take them in other orders.
constexpr int APART = 128 / (COLS * PLACE), ORDERS = APART < 1 ? 1 : APART < ROWS ? APART : ROWS;

extern __shared__ __align__(16) unsigned char stages[];

// Where step `step` of a tile has the thread's channels of tensor `k`.
__device__ __forceinline__ unsigned char* there(int stage, int step, int k) {
    int place = (step ^ step / ROWS % ORDERS) * COLS + threadIdx.x % COLS;
    return stages + stage * STAGE + k * TENSOR + place * PLACE;
}

// The `r`th step that a thread computes, and the `r`th that it copies: its own, where neighbouring channels fill what
// memory reads at once; else threads copy what neighbours in memory need, whichever thread will use it.
__device__ __forceinline__ int computed(int r) { return threadIdx.x / COLS * ROWS + r; }
__device__ __forceinline__ int copied(int r) { return OWN ? computed(r) : r * AT_ONCE + threadIdx.x / COLS; }

__device__ __forceinline__ void all_threads_copied() {
    if (!OWN) __syncthreads();
}

// Asks for a thread's neighbours in memory; `arrived` waits for them.
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

// What is asked for a tile is a group; all but those ahead have arrived.
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

// Asks for what a step reads. `FULL`: all the tile's steps are there, and one behind them.
template <bool FULL>
__device__ __forceinline__ void ask(const Params& p, const Place& at, int stage, int step) {
    i64 here = at.here + step * at.further;
#if !GRADIENT
    ask(p.x + here, there(stage, step, 0));
#elif SCAN == 2
    ask(p.dy + here, there(stage, step, 0));
#else
    bool follows = FULL || at.step + step + 1 < p.length;
    ask(p.x + here, there(stage, step, 0));
    ask(p.dy + here, there(stage, step, 1));
#if SCAN == 0
    if (follows) ask(p.y + here + at.further, there(stage, step, 2));
#elif SCAN == 1
    if (p.dlog_y) ask(p.dlog_y + here, there(stage, step, 2));
    if (follows) ask(p.y + here + at.further, there(stage, step, 3));
#else
    ask(p.wide_y + here, there(stage, step, 2));
    if (follows) ask(p.wide_y + here + at.further, there(stage, step, 3));
#endif
#endif
}

// What comes before a step of the scan, as a gradient sees it, which goes the other way.
template <class T, bool FULL>
__device__ __forceinline__ void before(const Params& p, const Place& at, int step, const void* y, REAL (&to)[VEC]) {
    if (FULL || at.step + step + 1 < p.length) return load((const T*)y, to);
#pragma unroll
    for (int v = 0; v < VEC; ++v) to[v] = first(p, at, v);
}

// What a step reads, for each of its channels.
template <bool FULL>
__device__ __forceinline__ void read(const Params& p, const Place& at, int stage, int step,
                                     REAL (&to)[READS][VEC]) {
    load((const STORAGE*)there(stage, step, 0), to[0]);
#if GRADIENT && SCAN != 2
    load((const STORAGE*)there(stage, step, 1), to[1]);
#if SCAN == 0
    before<STORAGE, FULL>(p, at, step, there(stage, step, 2), to[2]);
#elif SCAN == 1
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

// The first time: what can be computed once of what is read takes its place.
template <bool FULL>
__device__ __forceinline__ void read_first(const Params& p, const Place& at, int stage, int step,
                                           REAL (&to)[READS][VEC]) {
    read<FULL>(p, at, stage, step, to);
#if SCAN == 1 && !GRADIENT
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
#if SCAN == 1 && !GRADIENT
    load((const REAL*)there(stage, step, 0), to[0]);
#else
    read<FULL>(p, at, stage, step, to);
#endif
}

constexpr int WORDS = sizeof(Total) / 4;

// What the threads of a block, and the blocks of a cluster, tell each other in a round: what the steps of a warp, and
// of a block, are as a whole, and then what is before them. And the barrier that waits for the blocks.
struct Exchange {
    alignas(32) unsigned warps[WORDS][WARPS][CHANNELS];
    alignas(32) unsigned before[WORDS][CHANNELS];
    unsigned blocks[WORDS][MOST_BLOCKS][CHANNELS];
    u64 barrier;
};

#if SCAN == 0
__device__ __noinline__ void append_odd(Total (&sum)[VEC], const Total (&later)[VEC]) {
    for (int v = 0; v < VEC; ++v) sum[v] = then(sum[v], later[v]);
}
#endif

// Composes what is earlier with what is later, in each channel. Totals that are odd are rare, and looked for in all.
__device__ __forceinline__ void append(Total (&sum)[VEC], const Total (&later)[VEC]) {
#if SCAN == 0
    bool odd = false;
    Total all[VEC];
#pragma unroll
    for (int v = 0; v < VEC; ++v) {
        all[v] = swift(sum[v], later[v]);
        odd |= is_odd(all[v]);
    }
    if (odd) {
        Total a[VEC], b[VEC];
#pragma unroll
        for (int v = 0; v < VEC; ++v) a[v] = sum[v], b[v] = later[v];
        append_odd(a, b);
#pragma unroll
        for (int v = 0; v < VEC; ++v) all[v] = a[v];
    }
#pragma unroll
    for (int v = 0; v < VEC; ++v) sum[v] = all[v];
#else
#pragma unroll
    for (int v = 0; v < VEC; ++v) sum[v] = then(sum[v], later[v]);
#endif
}

constexpr int PACKED = VEC < 4 ? VEC : 4;
struct alignas(PACKED * 4) Pack { unsigned of[PACKED]; };

// The totals of neighbouring channels, whose words lie `apart`.
__device__ __forceinline__ void put(const Total (&totals)[VEC], unsigned* to, int apart) {
    unsigned words[VEC][WORDS];
    memcpy(words, totals, sizeof(words));
#pragma unroll
    for (int w = 0; w < WORDS; ++w)
#pragma unroll
        for (int first = 0; first < VEC; first += PACKED) {
            Pack pack;
#pragma unroll
            for (int v = 0; v < PACKED; ++v) pack.of[v] = words[first + v][w];
            *(Pack*)(to + w * apart + first) = pack;
        }
}

__device__ __forceinline__ void get(const unsigned* from, int apart, Total (&totals)[VEC]) {
    unsigned words[VEC][WORDS];
#pragma unroll
    for (int w = 0; w < WORDS; ++w)
#pragma unroll
        for (int first = 0; first < VEC; first += PACKED) {
            Pack pack = *(const Pack*)(from + w * apart + first);
#pragma unroll
            for (int v = 0; v < PACKED; ++v) words[first + v][w] = pack.of[v];
        }
    memcpy(totals, words, sizeof(words));
}

// The same for a single channel.
__device__ __forceinline__ void put(Total total, unsigned* to, int apart) {
    unsigned words[WORDS];
    memcpy(words, &total, sizeof(words));
#pragma unroll
    for (int w = 0; w < WORDS; ++w) to[w * apart] = words[w];
}

__device__ __forceinline__ Total get(const unsigned* from, int apart) {
    unsigned words[WORDS];
#pragma unroll
    for (int w = 0; w < WORDS; ++w) words[w] = from[w * apart];
    Total total;
    memcpy(&total, words, sizeof(words));
    return total;
}

// Puts what is before each warp in the place of its total, in the thread's channel; and what all are as a whole.
__device__ __forceinline__ Total over_warps(Exchange& shared) {
    Total sum = identity(), all[WARPS];
#pragma unroll
    for (int i = 0; i < WARPS; ++i) all[i] = get(&shared.warps[0][i][threadIdx.x], WARPS * CHANNELS);
#pragma unroll
    for (int i = 0; i < WARPS; ++i) {
        put(sum, &shared.warps[0][i][threadIdx.x], WARPS * CHANNELS);
        sum = then(sum, all[i]);
    }
    return sum;
}

// What lane `from` has.
__device__ __forceinline__ Total of_lane(Total own, int from) {
    unsigned words[WORDS];
    memcpy(words, &own, sizeof(words));
#pragma unroll
    for (int w = 0; w < WORDS; ++w) words[w] = __shfl_sync(~0u, words[w], from & 31);
    memcpy(&own, words, sizeof(words));
    return own;
}

#if CLUSTERED
__device__ __forceinline__ int own_rank() { return rank_in_cluster(); }

__device__ __forceinline__ void begin(Exchange (&exchange)[2]) {
    if (threadIdx.x < 2) {
        unsigned barrier = address(&exchange[threadIdx.x].barrier);
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
    }
    meet_in_cluster();
}

// Tells all blocks of the cluster what the tile of this one is as a whole, in the thread's channel.
__device__ __forceinline__ void tell(const Params& p, Exchange& shared, Total tile) {
    unsigned barrier = address(&shared.barrier), bytes = WORDS * CHANNELS * 4 * (unsigned)p.cluster;
    unsigned own = address(&shared.blocks[0][own_rank()][threadIdx.x]), words[WORDS];
    memcpy(words, &tile, sizeof(words));
    if (threadIdx.x == 0)
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
    for (int rank = 0; rank < p.cluster; ++rank) {
        unsigned there = in_block(own, rank), his = in_block(barrier, rank);
#pragma unroll
        for (int w = 0; w < WORDS; ++w)
            asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
                         ::"r"(there + w * MOST_BLOCKS * CHANNELS * 4), "r"(words[w]), "r"(his) : "memory");
    }
}

// Waits for what all blocks of the cluster tell in this round.
__device__ __forceinline__ void listen(const Exchange& shared, i64 round) {
    unsigned told, parity = round / 2 % 2;
    do
        asm volatile("{ .reg .pred told; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 told, [%1], %2; "
                     "selp.u32 %0, 1, 0, told; }"
                     : "=r"(told) : "r"(address(&shared.barrier)), "r"(parity) : "memory");
    while (!told);
}

// What is before the block's tile, and in `carry` what is before the next round.
__device__ __forceinline__ Total over_blocks(const Params& p, Exchange& shared, i64 round, Total tile, Total& carry) {
    tell(p, shared, tile);
    listen(shared, round);
    Total all[MOST_BLOCKS], before = carry;
#pragma unroll
    for (int i = 0; i < MOST_BLOCKS; ++i)
        if (i < p.cluster) all[i] = get(&shared.blocks[0][i][threadIdx.x], MOST_BLOCKS * CHANNELS);
#pragma unroll
    for (int i = 0; i < MOST_BLOCKS; ++i) {
        if (i == own_rank()) before = carry;
        if (i < p.cluster) carry = then(carry, all[i]);
    }
    return before;
}
#else
__device__ __forceinline__ int own_rank() { return 0; }
__device__ __forceinline__ void begin(Exchange (&)[2]) {}
__device__ __forceinline__ Total over_blocks(const Params&, Exchange&, i64, Total tile, Total& carry) {
    Total before = carry;
    carry = then(carry, tile);
    return before;
}
#endif

// What is before a thread, which knows what is before it in its warp: as many threads as there are channels see to what
// is before each warp and the tile, and know in `carry` what is before the next round.
__device__ __forceinline__ void exchange_totals(const Params& p, Exchange& shared, i64 round, Total& carry,
                                                const Total (&own)[VEC], Total (&before)[VEC]) {
    __syncthreads();
    if (threadIdx.x < CHANNELS)
        put(over_blocks(p, shared, round, over_warps(shared), carry), &shared.before[0][threadIdx.x], CHANNELS);
    __syncthreads();
    Total warps[VEC];
    int channel = threadIdx.x % COLS * VEC;
    get(&shared.before[0][channel], CHANNELS, before);
    get(&shared.warps[0][threadIdx.x / 32][channel], WARPS * CHANNELS, warps);
    append(before, warps);
    append(before, own);
}

// A cluster has some columns of a row. In a round each of its blocks has a tile, one after another in time.
__device__ __forceinline__ Place place(const Params& p) {
    Place at;
    i64 id = blockIdx.x / p.cluster;
    at.row = id / p.columns;
    at.channel = (id % p.columns * COLS + threadIdx.x % COLS) * VEC;
    at.inside = at.channel < p.width;
    at.step = own_rank() * STEPS;
    at.further = p.back ? -p.width : p.width;
    at.here = (at.row * p.length + (p.back ? p.length - 1 - at.step : at.step)) * p.width + at.channel;
    return at;
}

__device__ __forceinline__ Place next_round(const Params& p, Place at) {
    at.step += p.cluster * STEPS;
    at.here += p.cluster * STEPS * at.further;
    return at;
}

// How many of the tile's steps are there, at most all of them; and whether one follows.
__device__ __forceinline__ int steps(const Params& p, const Place& at) {
    i64 left = at.inside ? p.length - at.step : 0;
    return left < 0 ? 0 : left < STEPS ? left : STEPS;
}

__device__ __forceinline__ bool is_followed(const Params& p, const Place& at) {
    return at.inside && at.step + STEPS < p.length;
}

__device__ __forceinline__ void fetch(const Params& p, const Place& at, int stage) {
    if (is_followed(p, at)) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) ask<true>(p, at, stage, copied(r));
    } else {
        int count = steps(p, at);
        for (int r = 0; r < ROWS && copied(r) < count; ++r) ask<false>(p, at, stage, copied(r));
    }
    asked();
}

template <bool FULL>
__device__ __forceinline__ void summarize(const Params& p, const Place& at, int stage, Total (&own)[VEC]) {
    int count = steps(p, at);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        if (!FULL && computed(r) >= count) break;
        REAL all[READS][VEC];
        read_first<FULL>(p, at, stage, computed(r), all);
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
            REAL one[READS];
#pragma unroll
            for (int k = 0; k < READS; ++k) one[k] = all[k][v];
            own[v] = then(p, own[v], one);
        }
    }
}

// What a thread's steps are as a whole.
__device__ __forceinline__ void summarize(const Params& p, const Place& at, int stage, Total (&own)[VEC]) {
#pragma unroll
    for (int v = 0; v < VEC; ++v) own[v] = identity();
    if (is_followed(p, at))
        summarize<true>(p, at, stage, own);
    else
        summarize<false>(p, at, stage, own);
}

// Replaces a thread's total by what is before it in its warp.
__device__ __forceinline__ void over_lanes(Total (&own)[VEC], Exchange& shared) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int distance = COLS; distance < 32; distance *= 2) {
        Total left[VEC];
#pragma unroll
        for (int v = 0; v < VEC; ++v) left[v] = of_lane(own[v], lane - distance);
        if (lane >= distance) {
            append(left, own);
#pragma unroll
            for (int v = 0; v < VEC; ++v) own[v] = left[v];
        }
    }
    if (lane >= 32 - COLS)
        put(own, &shared.warps[0][threadIdx.x / 32][threadIdx.x % COLS * VEC], WARPS * CHANNELS);
#pragma unroll
    for (int v = 0; v < VEC; ++v) {
        own[v] = of_lane(own[v], lane - COLS);
        if (lane < COLS) own[v] = identity();
    }
}

// Writes a step's result: into memory, or in the place of what it read.
template <class T>
__device__ __forceinline__ void result(const Place& at, int stage, int step, int k, const REAL (&from)[VEC], T* to) {
    if (OWN)
        store_far(from, to + at.here + step * at.further);
    else
        store(from, (T*)there(stage, step, k));
}

template <bool FULL>
__device__ __forceinline__ void apply(const Params& p, const Place& at, int stage, State (&state)[VEC]) {
    int count = steps(p, at);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        if (!FULL && computed(r) >= count) break;
        REAL all[READS][VEC], y[VEC], log_y[VEC];
        read_again<FULL>(p, at, stage, computed(r), all);
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
            REAL one[READS];
#pragma unroll
            for (int k = 0; k < READS; ++k) one[k] = all[k][v];
            y[v] = step(p, state[v], one, log_y[v]);
        }
        result(at, stage, computed(r), 0, y, p.to);
#if SCAN == 1 && !GRADIENT
        result(at, stage, computed(r), 1, log_y, p.log_to);
#endif
    }
}

// Goes through a thread's steps.
__device__ __forceinline__ void apply(const Params& p, const Place& at, int stage, State (&state)[VEC]) {
    if (is_followed(p, at))
        apply<true>(p, at, stage, state);
    else
        apply<false>(p, at, stage, state);
}

template <class T>
__device__ __forceinline__ void copy(const unsigned char* from, T* to) {
    constexpr int BYTES = VEC * sizeof(T), EACH = BYTES > 16 ? 16 : BYTES;
    struct alignas(EACH) Piece { unsigned char of[EACH]; };
#pragma unroll
    for (int b = 0; b < BYTES; b += EACH) *(Piece*)((char*)to + b) = *(const Piece*)(from + b);
}

__device__ __forceinline__ void write(const Params& p, const Place& at, int stage, int step) {
    i64 here = at.here + step * at.further;
    copy(there(stage, step, 0), p.to + here);
#if SCAN == 1 && !GRADIENT
    copy(there(stage, step, 1), p.log_to + here);
#endif
}

// Writes a tile's results, unless they are written.
__device__ __forceinline__ void write(const Params& p, const Place& at, int stage) {
    if (OWN) return;
    __syncthreads();
    if (is_followed(p, at)) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) write(p, at, stage, copied(r));
    } else {
        int count = steps(p, at);
        for (int r = 0; r < ROWS && copied(r) < count; ++r) write(p, at, stage, copied(r));
    }
}

// What the thread with the scan's last step ends with.
__device__ __forceinline__ void end(const Params& p, const Place& at, const State (&state)[VEC]) {
    i64 mine = at.step + computed(0);
    if (!p.last || !at.inside || mine + ROWS < p.length || (mine >= p.length && mine > 0)) return;
#pragma unroll
    for (int v = 0; v < VEC; ++v)
        p.last[at.row * p.width + at.channel + v] = last(state[v], GRADIENT ? first(p, at, v) : (REAL)0);
}

// A round asks for a tile ahead, waits for its own, learns what is before it and writes its results. Neighbouring
// rounds exchange in places of their own: nobody is two rounds ahead of anybody.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) cumulative(Params p) {
    __shared__ Exchange exchange[2];
    begin(exchange);
    Place at = place(p), ahead = at;
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) {
        fetch(p, ahead, stage);
        ahead = next_round(p, ahead);
    }
    State starts[VEC];
#pragma unroll
    for (int v = 0; v < VEC; ++v) {
        REAL given = at.inside && p.start ? p.start[at.row * p.width + at.channel + v] : (REAL)0;
        starts[v] = start(given, p.start);
    }
    Total carry = identity();
    int stage = 0, free = STAGES - 1;
    for (i64 round = 0; round < p.rounds; ++round) {
        fetch(p, ahead, free);
        arrived();
        all_threads_copied();

        Total own[VEC], before[VEC];
        State state[VEC];
        summarize(p, at, stage, own);
        over_lanes(own, exchange[round % 2]);
        exchange_totals(p, exchange[round % 2], round, carry, own, before);
#pragma unroll
        for (int v = 0; v < VEC; ++v) state[v] = after(starts[v], before[v]);
        apply(p, at, stage, state);
        end(p, at, state);
        write(p, at, stage);

        at = next_round(p, at);
        ahead = next_round(p, ahead);
        free = stage;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
}
