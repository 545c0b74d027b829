// How all of them go through memory: scans.cu says in which order.

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

// Where a thread stands in its tile.
struct Place {
    i64 row, tile, column, channel, step;
    bool inside;
};

__device__ __forceinline__ i64 address(const Params& p, const Place& at, i64 step) {
    i64 time = p.back ? p.length - 1 - step : step;
    return (at.row * p.length + time) * p.width + at.channel;
}

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

template <class T>
__device__ __forceinline__ void before(const Params& p, const T* y, const Place& at, i64 step, REAL (&to)[VEC]) {
    if (step + 1 < p.length) return load(y + address(p, at, step + 1), to);
#pragma unroll
    for (int v = 0; v < VEC; ++v) to[v] = first(p, at, v);
}

// What a step reads, for each of its channels.
__device__ __forceinline__ void read(const Params& p, const Place& at, i64 step, REAL (&to)[READS][VEC]) {
    i64 here = address(p, at, step);
#if !GRADIENT
    load(p.x + here, to[0]);
#elif SCAN == 2
    load(p.dy + here, to[0]);
#else
    load(p.x + here, to[0]);
    load(p.dy + here, to[1]);
#if SCAN == 0
    before(p, p.y, at, step, to[2]);
#elif SCAN == 1
    if (p.dlog_y) {
        load(p.dlog_y + here, to[2]);
    } else {
#pragma unroll
        for (int v = 0; v < VEC; ++v) to[2][v] = 0;
    }
    before(p, p.y, at, step, to[3]);
#else
    load(p.wide_y + here, to[2]);
    before(p, p.wide_y, at, step, to[3]);
#endif
#endif
}

// What can be computed once of what is read.
__device__ __forceinline__ void prepare(const Params& p, REAL (&read)[READS][VEC]) {
#if SCAN == 1 && !GRADIENT
#pragma unroll
    for (int v = 0; v < VEC; ++v) {
        REAL log = logarithm(bounded(read[0][v], p.eps, 1));
        read[0][v] = log < (REAL)p.log_min ? (REAL)p.log_min : log;
    }
#endif
}

constexpr int WORDS = sizeof(Total) / 4;
// Threads of a column, one after another in time; and channels of a tile.
constexpr int AT_ONCE = THREADS / COLS, CHANNELS = COLS * VEC;
// Threads of a channel, where each thread has one.
constexpr int PARTS = THREADS / CHANNELS < 8 ? THREADS / CHANNELS : 8;

struct Exchange {
    alignas(16) unsigned threads[WORDS][AT_ONCE][CHANNELS];
    alignas(16) unsigned parts[WORDS][PARTS + 1][CHANNELS];
};

struct alignas(VEC * 4) Pack { unsigned of[VEC]; };

// The totals of a thread's channels, to where rows are those of threads or parts, and back.
template <int ROWS_THERE>
__device__ __forceinline__ void put(unsigned (&to)[WORDS][ROWS_THERE][CHANNELS], int row, const Total (&totals)[VEC]) {
    unsigned words[VEC][WORDS];
    memcpy(words, totals, sizeof(words));
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {
        Pack pack;
#pragma unroll
        for (int v = 0; v < VEC; ++v) pack.of[v] = words[v][w];
        *(Pack*)&to[w][row][threadIdx.x % COLS * VEC] = pack;
    }
}

template <int ROWS_THERE>
__device__ __forceinline__ void get(const unsigned (&from)[WORDS][ROWS_THERE][CHANNELS], int row, Total (&totals)[VEC]) {
    unsigned words[VEC][WORDS];
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {
        Pack pack = *(const Pack*)&from[w][row][threadIdx.x % COLS * VEC];
#pragma unroll
        for (int v = 0; v < VEC; ++v) words[v][w] = pack.of[v];
    }
    memcpy(totals, words, sizeof(words));
}

// The same of a single channel.
template <int ROWS_THERE>
__device__ __forceinline__ void put(unsigned (&to)[WORDS][ROWS_THERE][CHANNELS], int row, int channel, Total total) {
    unsigned words[WORDS];
    memcpy(words, &total, sizeof(words));
#pragma unroll
    for (int w = 0; w < WORDS; ++w) to[w][row][channel] = words[w];
}

template <int ROWS_THERE>
__device__ __forceinline__ Total get(const unsigned (&from)[WORDS][ROWS_THERE][CHANNELS], int row, int channel) {
    unsigned words[WORDS];
#pragma unroll
    for (int w = 0; w < WORDS; ++w) words[w] = from[w][row][channel];
    Total total;
    memcpy(&total, words, sizeof(words));
    return total;
}

// A thread of a channel: which part of what is to be composed is its own, and none for those that are too many.
struct Part {
    int channel, part;
    __device__ Part() : channel(threadIdx.x % CHANNELS), part(threadIdx.x / CHANNELS) {}
    __device__ bool there() const { return part < PARTS; }
    __device__ bool first() const { return part == 0; }
};

// Composes the parts: those before a thread's own, if that is `to`, or all.
__device__ __forceinline__ Total parts(const Exchange& shared, const Part& me, int to) {
    Total total = identity();
    for (int i = 0; i < to; ++i) total = then(total, get(shared.parts, i, me.channel));
    return total;
}

// Puts in place of each thread's totals those of the threads before it; returns those of all.
__device__ Total across(Exchange& shared, const Part& me) {
    constexpr int EACH = AT_ONCE / PARTS;
    if (me.there()) {
        Total own = identity();
        for (int i = 0; i < EACH; ++i) own = then(own, get(shared.threads, me.part * EACH + i, me.channel));
        put(shared.parts, me.part, me.channel, own);
    }
    __syncthreads();
    if (me.there()) {
        Total before = parts(shared, me, me.part);
        for (int i = 0; i < EACH; ++i) {
            Total own = get(shared.threads, me.part * EACH + i, me.channel);
            put(shared.threads, me.part * EACH + i, me.channel, before);
            before = then(before, own);
        }
    }
    return parts(shared, me, me.first() ? PARTS : 0);
}

// Tile or group `i` of this row and these columns: groups come after the tiles.
__device__ __forceinline__ i64 slot(const Params& p, const Place& at, i64 i) {
    return (at.row * p.columns + at.column) * (p.tiles + p.groups) + i;
}

__device__ __forceinline__ unsigned* totals(const Params& p, const Place& at, i64 i, const Part& me) {
    return p.totals + slot(p, at, i) * WORDS * CHANNELS + me.channel;
}

// The first thread of each channel has its total.
__device__ void publish(const Params& p, const Place& at, i64 i, const Part& me, Total total) {
    if (me.first()) {
        unsigned words[WORDS];
        memcpy(words, &total, sizeof(words));
#pragma unroll
        for (int w = 0; w < WORDS; ++w) totals(p, at, i, me)[w * CHANNELS] = words[w];
        __threadfence();
    }
    __syncthreads();
    if (threadIdx.x == 0) *(volatile unsigned*)(p.published + slot(p, at, i)) = 1;
}

// Waits for `count` tiles or groups from `from` on and composes them: the first thread of each channel has the total.
__device__ Total collect(const Params& p, const Place& at, i64 from, i64 count, const Part& me, Exchange& shared) {
    for (i64 i = threadIdx.x; i < count; i += THREADS) {
        while (!*(volatile unsigned*)(p.published + slot(p, at, from + i))) {
        }
        __threadfence();
    }
    __syncthreads();
    if (me.there()) {
        i64 each = (count + PARTS - 1) / PARTS, begin = me.part * each;
        Total own = identity();
#pragma unroll 4
        for (i64 i = begin; i < begin + each && i < count; ++i) {
            // Past the first-level caches, which do not see what other multiprocessors write.
            const volatile unsigned* there = totals(p, at, from + i, me);
            unsigned words[WORDS];
#pragma unroll
            for (int w = 0; w < WORDS; ++w) words[w] = there[w * CHANNELS];
            Total one;
            memcpy(&one, words, sizeof(words));
            own = then(own, one);
        }
        put(shared.parts, me.part, me.channel, own);
    }
    __syncthreads();
    Total all = parts(shared, me, me.first() ? PARTS : 0);
    __syncthreads();
    return all;
}

// Tiles in the order of time, whichever block comes first.
__device__ __forceinline__ Place place(const Params& p) {
    __shared__ u64 taken;
    if (threadIdx.x == 0) taken = p.tiles > 1 ? atomicAdd(p.next, 1ull) : blockIdx.x;
    __syncthreads();
    Place at;
    i64 id = taken, side_by_side = p.rows * p.columns;
    at.tile = id / side_by_side;
    at.row = id % side_by_side / p.columns;
    at.column = id % p.columns;
    at.channel = (at.column * COLS + threadIdx.x % COLS) * VEC;
    at.inside = at.channel < p.width;
    at.step = (at.tile * AT_ONCE + threadIdx.x / COLS) * ROWS;
    return at;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) cumulative(Params p) {
    __shared__ Exchange shared;
    Place at = place(p);
    REAL all[ROWS][READS][VEC];
    i64 rows = !at.inside || at.step >= p.length ? 0 : p.length - at.step < ROWS ? p.length - at.step : ROWS;
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
        if (r < rows) read(p, at, at.step + r, all[r]);

    Total own[VEC], prefix[VEC];
#pragma unroll
    for (int v = 0; v < VEC; ++v) own[v] = prefix[v] = identity();
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        if (r >= rows) break;
        prepare(p, all[r]);
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
            REAL one[READS];
#pragma unroll
            for (int k = 0; k < READS; ++k) one[k] = all[r][k][v];
            own[v] = then(p, own[v], one);
        }
    }
    Part me;
    put(shared.threads, threadIdx.x / COLS, own);
    __syncthreads();
    Total tile = across(shared, me);
    if (p.tiles > 1) {
        publish(p, at, at.tile, me, tile);
        i64 group = at.tile / GROUP, of_group = at.tile % GROUP;
        Total earlier = collect(p, at, group * GROUP, of_group, me, shared);
        if (of_group == GROUP - 1) publish(p, at, p.tiles + group, me, then(earlier, tile));
        if (group > 0) earlier = then(collect(p, at, p.tiles, group, me, shared), earlier);
        if (me.first()) put(shared.parts, PARTS, me.channel, earlier);
    }
    __syncthreads();
    get(shared.threads, threadIdx.x / COLS, own);
    if (p.tiles > 1) get(shared.parts, PARTS, prefix);

    State state[VEC];
#pragma unroll
    for (int v = 0; v < VEC; ++v) {
        REAL given = at.inside && p.start ? p.start[at.row * p.width + at.channel + v] : (REAL)0;
        state[v] = after(after(start(given, p.start), prefix[v]), own[v]);
    }

#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        if (r >= rows) break;
        REAL result[VEC], log_result[VEC];
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
            REAL one[READS];
#pragma unroll
            for (int k = 0; k < READS; ++k) one[k] = all[r][k][v];
            result[v] = step(p, state[v], one, log_result[v]);
        }
        i64 here = address(p, at, at.step + r);
        store(result, p.to + here);
#if SCAN == 1 && !GRADIENT
        store(log_result, p.log_to + here);
#endif
    }
    bool ends = at.tile == p.tiles - 1 && threadIdx.x / COLS == AT_ONCE - 1;
    if (p.last && ends && at.inside) {
#pragma unroll
        for (int v = 0; v < VEC; ++v)
            p.last[at.row * p.width + at.channel + v] = last(state[v], GRADIENT ? first(p, at, v) : (REAL)0);
    }
}
