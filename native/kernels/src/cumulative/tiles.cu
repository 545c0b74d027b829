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

// What a block reads ahead lies in shared memory, and what it writes takes its place.
#if SCAN != 2 && (GRADIENT || SCAN == 1)
typedef REAL Widest;
#else
typedef Y Widest;
#endif
constexpr int PLACE = VEC * sizeof(Widest), WRITES = SCAN == 1 && !GRADIENT ? 2 : 1;
constexpr int TENSORS = READS > WRITES ? READS : WRITES;
// Behind the steps of a thread comes a gap, without which those of many threads would lie in the same banks.
constexpr int GAP = COLS < 8, TENSOR = (STEPS + GAP * AT_ONCE) * COLS * PLACE, STAGE = TENSORS * TENSOR;

extern __shared__ __align__(16) unsigned char stages[];

// Where step `step` of a tile has the thread's channels of tensor `k`.
__device__ __forceinline__ unsigned char* there(int stage, int step, int k) {
    return stages + stage * STAGE + k * TENSOR + ((step + GAP * (step / ROWS)) * COLS + threadIdx.x % COLS) * PLACE;
}

// Threads copy what neighbours in memory need, whichever thread will use it: the `r`th step that a thread copies, and
// the `r`th that it computes.
__device__ __forceinline__ int copied(int r) { return r * AT_ONCE + threadIdx.x / COLS; }
__device__ __forceinline__ int computed(int r) { return threadIdx.x / COLS * ROWS + r; }

// Asks for a thread's neighbours in memory; `arrived` waits for them.
template <class T>
__device__ __forceinline__ void ask(const T* from, unsigned char* to) {
    constexpr int BYTES = VEC * sizeof(T), EACH = BYTES > 16 ? 16 : BYTES;
#if __CUDA_ARCH__ >= 800
    if constexpr (EACH >= 4) {
#pragma unroll
        for (int b = 0; b < BYTES; b += EACH) {
            unsigned there = (unsigned)__cvta_generic_to_shared(to + b);
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

// What is asked for a tile is a group; all but the last have arrived.
__device__ __forceinline__ void asked() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

__device__ __forceinline__ void arrived() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(1) : "memory");
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
// Blocks of a cluster at most.
constexpr int MOST_BLOCKS = CLUSTERED ? 8 : 1;

// What the threads of a block, and the blocks of a cluster, tell each other in a round: what the steps of a warp, and
// of a block, are as a whole. And the barrier that waits for the blocks.
struct Exchange {
    alignas(16) unsigned warps[WORDS][WARPS][CHANNELS];
    alignas(16) unsigned blocks[WORDS][MOST_BLOCKS][CHANNELS];
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

struct alignas(VEC * 4) Pack { unsigned of[VEC]; };

// The totals of neighbouring channels, whose words lie `apart`.
__device__ __forceinline__ void put(const Total (&totals)[VEC], unsigned* to, int apart) {
    unsigned words[VEC][WORDS];
    memcpy(words, totals, sizeof(words));
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {
        Pack pack;
#pragma unroll
        for (int v = 0; v < VEC; ++v) pack.of[v] = words[v][w];
        *(Pack*)(to + w * apart) = pack;
    }
}

__device__ __forceinline__ void get(const unsigned* from, int apart, Total (&totals)[VEC]) {
    unsigned words[VEC][WORDS];
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {
        Pack pack = *(const Pack*)(from + w * apart);
#pragma unroll
        for (int v = 0; v < VEC; ++v) words[v][w] = pack.of[v];
    }
    memcpy(totals, words, sizeof(words));
}

// Puts `before` behind all that come before the `me`th of these, and `sum` behind all.
template <int MOST>
__device__ __forceinline__ void compose(const unsigned (&of)[WORDS][MOST][CHANNELS], int count, int me,
                                        Total (&sum)[VEC], Total (&before)[VEC]) {
#pragma unroll
    for (int i = 0; i < MOST; ++i) {
        if (i >= count) break;
        if (i == me) {
#pragma unroll
            for (int v = 0; v < VEC; ++v) before[v] = sum[v];
        }
        Total one[VEC];
        get(&of[0][i][threadIdx.x % COLS * VEC], MOST * CHANNELS, one);
        append(sum, one);
    }
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
__device__ __forceinline__ int own_rank() {
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ unsigned address(const void* shared) { return (unsigned)__cvta_generic_to_shared(shared); }

__device__ __forceinline__ unsigned in_block(unsigned address, int rank) {
    unsigned there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

__device__ __forceinline__ void begin(Exchange (&exchange)[2]) {
    if (threadIdx.x < 2) {
        unsigned barrier = address(&exchange[threadIdx.x].barrier);
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
    }
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Writes neighbouring words into another block's memory, and tells its barrier so.
__device__ __forceinline__ void tell(unsigned there, const unsigned (&words)[VEC], unsigned barrier) {
    if constexpr (VEC == 4)
        asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];"
                     ::"r"(there), "r"(words[0]), "r"(words[VEC / 4]), "r"(words[VEC / 2]), "r"(words[VEC - 1]),
                     "r"(barrier) : "memory");
    else
#pragma unroll
        for (int v = 0; v < VEC; ++v)
            asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
                         ::"r"(there + v * 4), "r"(words[v]), "r"(barrier) : "memory");
}

// Tells all blocks of the cluster what the tile of this one is as a whole: each warp tells some of them.
__device__ __forceinline__ void tell(const Params& p, Exchange& shared, const Total (&tile)[VEC]) {
    unsigned barrier = address(&shared.barrier), bytes = WORDS * CHANNELS * 4 * (unsigned)p.cluster;
    unsigned own = address(&shared.blocks[0][own_rank()][threadIdx.x % COLS * VEC]);
    if (threadIdx.x == 0)
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
    if (threadIdx.x % 32 >= COLS) return;
    unsigned words[WORDS][VEC];
#pragma unroll
    for (int v = 0; v < VEC; ++v) {
        unsigned of[WORDS];
        memcpy(of, &tile[v], sizeof(of));
#pragma unroll
        for (int w = 0; w < WORDS; ++w) words[w][v] = of[w];
    }
    for (int rank = threadIdx.x / 32; rank < p.cluster; rank += WARPS) {
        unsigned there = in_block(own, rank), his = in_block(barrier, rank);
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
            tell(there, words[w], his);
            there += MOST_BLOCKS * CHANNELS * 4;
        }
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
#else
__device__ __forceinline__ int own_rank() { return 0; }
__device__ __forceinline__ void begin(Exchange (&)[2]) {}
#endif

// What is before a thread's tile and its warp, and in `carry` what is before the next round.
__device__ __forceinline__ void exchange_totals(const Params& p, Exchange& shared, i64 round, Total (&carry)[VEC],
                                                Total (&before)[VEC]) {
#if CLUSTERED
    Total tile[VEC], warps[VEC];
#pragma unroll
    for (int v = 0; v < VEC; ++v) tile[v] = identity();
    compose(shared.warps, WARPS, threadIdx.x / 32, tile, warps);
    tell(p, shared, tile);
    listen(shared, round);
    compose(shared.blocks, p.cluster, own_rank(), carry, before);
    append(before, warps);
#else
    compose(shared.warps, WARPS, threadIdx.x / 32, carry, before);
#endif
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

template <bool FULL>
__device__ __forceinline__ void apply(const Params& p, const Place& at, int stage, State (&state)[VEC]) {
    int count = steps(p, at);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        if (!FULL && computed(r) >= count) break;
        REAL all[READS][VEC], result[VEC], log_result[VEC];
        read_again<FULL>(p, at, stage, computed(r), all);
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
            REAL one[READS];
#pragma unroll
            for (int k = 0; k < READS; ++k) one[k] = all[k][v];
            result[v] = step(p, state[v], one, log_result[v]);
        }
        store(result, (Y*)there(stage, computed(r), 0));
#if SCAN == 1 && !GRADIENT
        store(log_result, (REAL*)there(stage, computed(r), 1));
#endif
    }
}

// Goes through a thread's steps: their results take the place of what they read.
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

// Writes a tile's results.
__device__ __forceinline__ void write(const Params& p, const Place& at, int stage) {
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

// A round asks for the next tile, waits for its own, learns what is before it and writes its results. Neighbouring
// rounds exchange in places of their own: nobody is two rounds ahead of anybody.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) cumulative(Params p) {
    __shared__ Exchange exchange[2];
    begin(exchange);
    Place at = place(p);
    fetch(p, at, 0);
    Total carry[VEC];
    State starts[VEC];
#pragma unroll
    for (int v = 0; v < VEC; ++v) {
        REAL given = at.inside && p.start ? p.start[at.row * p.width + at.channel + v] : (REAL)0;
        starts[v] = start(given, p.start);
        carry[v] = identity();
    }
    for (i64 round = 0; round < p.rounds; ++round) {
        int stage = round % 2;
        Place next = next_round(p, at);
        fetch(p, next, 1 - stage);
        arrived();
        __syncthreads();

        Total own[VEC], before[VEC];
        State state[VEC];
        summarize(p, at, stage, own);
        over_lanes(own, exchange[stage]);
        __syncthreads();

        exchange_totals(p, exchange[stage], round, carry, before);
        append(before, own);
#pragma unroll
        for (int v = 0; v < VEC; ++v) state[v] = after(starts[v], before[v]);
        apply(p, at, stage, state);
        end(p, at, state);
        __syncthreads();

        write(p, at, stage);
        at = next;
    }
}
