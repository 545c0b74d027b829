// Cumulative products, sums and log-sums, and their gradients, in one pass over memory. The formulas are in
// mod.rs; cuda.rs chooses the macros:
//   SCAN       0 the product, 1 the product by logarithms, 2 the sum, 3 the log-sum-exp
//   GRADIENT   0 the scan, 1 its gradient: time runs the other way
//   Y          the type of what the scan writes
//   VEC        neighbouring channels of a thread
//   COLS       threads side by side; the others are one after another in time
//   ROWS       steps of a thread
//   GROUP      tiles of a group
//   THREADS    threads of a block
//   BLOCKS     blocks that a multiprocessor shall hold
//
// A block takes a tile of time and channels. Its threads read all their rows before they do anything, compose them
// as a whole, and so do threads, and then the block publishes what the tile is as a whole. It waits for those of the
// earlier tiles of its group and of the earlier groups, composes them, always in the same order, and goes through its
// rows, which it still holds, from there. Tiles are taken in the order of time, each by a block that is already
// running, and what a tile publishes waits for tiles of its own group alone: somebody can always go on.

typedef unsigned long long u64;

struct Params {
    const STORAGE* x;
    const STORAGE* y;
    const REAL* wide_y;
    const STORAGE* dy;
    const REAL* dlog_y;
    // What the scan starts from; what this walk starts from, which is the same, or `dlast_state`.
    const REAL *first, *start;
    Y* to;
    REAL *log_to, *last;
    // Zeroed: the next tile, and which tiles and groups are published.
    u64* next;
    unsigned* published;
    // What each tile and each group is as a whole.
    REAL* totals;
    i64 rows, length, width, columns, tiles, groups;
    double eps, log_min, floor;
    i64 back;
};

__device__ __forceinline__ float power(float v, int n) { return ldexpf(v, n); }
__device__ __forceinline__ double power(double v, int n) { return ldexp(v, n); }
__device__ __forceinline__ float exponential(float v) { return expf(v); }
__device__ __forceinline__ double exponential(double v) { return exp(v); }
__device__ __forceinline__ float logarithm(float v) { return logf(v); }
__device__ __forceinline__ double logarithm(double v) { return log(v); }

// Not fmin and fmax, which turn NaN into a number.
__device__ __forceinline__ REAL bounded(REAL v, REAL low, REAL high) { return v < low ? low : v > high ? high : v; }

// exp(a - b), where equal infinities are no distance apart.
__device__ __forceinline__ REAL ratio(REAL a, REAL b) { return a == b ? (REAL)1 : exponential(a - b); }

// A factor and a power of 2^40: it may be larger or smaller by far than any number of the type, and what it is
// multiplied with the other way round.
struct Factor {
    REAL factor, power;
};

__device__ __forceinline__ Factor scaled(REAL factor, REAL power) {
    constexpr REAL HIGH = 0x1p20, LOW = 0x1p-20, INFINITE = 1.0f / 0.0f;
    for (; (factor > HIGH || factor < -HIGH) && factor < INFINITE && factor > -INFINITE; ++power) factor *= (REAL)0x1p-40;
    for (; factor < LOW && factor > -LOW && factor != 0; --power) factor *= (REAL)0x1p40;
    return {factor, power};
}

__device__ __forceinline__ REAL times(REAL v, Factor by) {
    if (by.power == 0) return v * by.factor;
    Factor both = scaled(v, by.power);
    REAL bound = both.power < -60 ? (REAL)-60 : both.power > 60 ? (REAL)60 : both.power;
    return power(both.factor * by.factor, 40 * (int)bound);
}

// What a scan is made of:
//   READS       tensors it reads; `load` reads the numbers of one step
//   Total       a stretch of time as a whole: `identity`, `then` of two, and of one and a step
//   State       what is carried on from step to step: `start`, `after` a stretch, `last` as it is seen outside
//   step        one step: writes its result
//   WORDS       numbers of a Total, which consists of nothing else

#if SCAN == 0 && !GRADIENT

constexpr int READS = 1, WORDS = 2;
struct Total { REAL factor, power; };
typedef REAL State;
__device__ Total identity() { return {1, 0}; }
__device__ Total then(Total a, Total b) {
    Factor both = scaled(a.factor * b.factor, a.power + b.power);
    return {both.factor, both.power};
}
// Rescaled where threads are put together: there are few steps to one.
__device__ Total then(const Params& p, Total a, const REAL (&read)[READS]) { return {a.factor * read[0], a.power}; }
__device__ State start(REAL given, bool there) { return there ? given : (REAL)1; }
__device__ State after(State s, Total t) { return times(s, {t.factor, t.power}); }
__device__ REAL step(const Params& p, State& s, const REAL (&read)[READS], REAL&) { return s *= read[0]; }
__device__ REAL last(State s, REAL) { return s; }

#elif SCAN == 0

// Reads gamma, dy and the y before; carries gamma T.
constexpr int READS = 3, WORDS = 3;
struct Total { REAL factor, power, end; };
typedef REAL State;
__device__ Total identity() { return {1, 0, 0}; }
__device__ Total then(Total a, Total b) {
    Factor both = scaled(a.factor * b.factor, a.power + b.power);
    return {both.factor, both.power, times(a.end, {b.factor, b.power}) + b.end};
}
__device__ Total then(const Params& p, Total a, const REAL (&read)[READS]) {
    return {a.factor * read[0], a.power, read[0] * (read[1] + a.end)};
}
__device__ State start(REAL given, bool there) { return there ? given : (REAL)0; }
__device__ State after(State s, Total t) { return times(s, {t.factor, t.power}) + t.end; }
__device__ REAL step(const Params& p, State& s, const REAL (&read)[READS], REAL&) {
    REAL total = read[1] + s;
    s = read[0] * total;
    return read[2] * total;
}
__device__ REAL last(State s, REAL) { return s; }

#elif SCAN == 1 && !GRADIENT

// Reads the logarithm of the factor.
constexpr int READS = 1, WORDS = 1;
struct Total { REAL sum; };
typedef REAL State;
__device__ Total identity() { return {0}; }
__device__ Total then(Total a, Total b) { return {a.sum + b.sum}; }
__device__ Total then(const Params& p, Total a, const REAL (&read)[READS]) { return {a.sum + read[0]}; }
__device__ State start(REAL given, bool there) { return there ? given : (REAL)0; }
__device__ State after(State s, Total t) { return s + t.sum; }
__device__ REAL step(const Params& p, State& s, const REAL (&read)[READS], REAL& log_y) {
    log_y = s += read[0];
    return exponential(s);
}
__device__ REAL last(State s, REAL) { return s; }

#elif SCAN == 1

// Reads gamma, dy, dlog_y and the y before; carries f T and the sum of dlog_y.
constexpr int READS = 4, WORDS = 3;
struct Total { REAL factor, end, sum; };
struct State { REAL later, sum; };
__device__ REAL decay(const Params& p, REAL gamma) { return bounded(gamma, p.floor, 1); }
__device__ Total identity() { return {1, 0, 0}; }
__device__ Total then(Total a, Total b) {
    return {a.factor * b.factor, b.factor * a.end + b.end, a.sum + b.sum};
}
__device__ Total then(const Params& p, Total a, const REAL (&read)[READS]) {
    REAL f = decay(p, read[0]);
    return {a.factor * f, f * (read[1] + a.end), a.sum + read[2]};
}
__device__ State start(REAL given, bool there) { return {0, there ? given : (REAL)0}; }
__device__ State after(State s, Total t) { return {t.factor * s.later + t.end, s.sum + t.sum}; }
__device__ REAL step(const Params& p, State& s, const REAL (&read)[READS], REAL&) {
    REAL gamma = read[0], total = read[1] + s.later;
    s.later = decay(p, gamma) * total;
    s.sum += read[2];
    return gamma < (REAL)p.floor || gamma > 1 ? (REAL)0 : read[3] * total + s.sum / gamma;
}
__device__ REAL last(State s, REAL first) { return first * s.later + s.sum; }

#elif SCAN == 2

// Its own gradient, of dy.
constexpr int READS = 1, WORDS = 1;
struct Total { REAL sum; };
typedef REAL State;
__device__ Total identity() { return {0}; }
__device__ Total then(Total a, Total b) { return {a.sum + b.sum}; }
__device__ Total then(const Params& p, Total a, const REAL (&read)[READS]) { return {a.sum + read[0]}; }
__device__ State start(REAL given, bool there) { return there ? given : (REAL)0; }
__device__ State after(State s, Total t) { return s + t.sum; }
__device__ REAL step(const Params& p, State& s, const REAL (&read)[READS], REAL&) { return s += read[0]; }
__device__ REAL last(State s, REAL) { return s; }

#elif !GRADIENT

// The largest number, and the sum of the exponentials of how far each is below it.
constexpr int READS = 1, WORDS = 2;
struct Total { REAL max, sum; };
typedef Total State;
__device__ REAL none() { return -(REAL)(1.0f / 0.0f); }
__device__ Total identity() { return {none(), 0}; }
__device__ Total then(Total a, Total b) {
    REAL max = a.max < b.max || b.max != b.max ? b.max : a.max;
    return {max, a.sum * ratio(a.max, max) + b.sum * ratio(b.max, max)};
}
__device__ Total then(const Params& p, Total a, const REAL (&read)[READS]) { return then(a, {read[0], 1}); }
__device__ State start(REAL given, bool there) { return {there ? given : none(), there ? (REAL)1 : (REAL)0}; }
__device__ State after(State s, Total t) { return then(s, t); }
__device__ REAL last(State s, REAL) { return s.max + logarithm(s.sum); }
__device__ REAL step(const Params& p, State& s, const REAL (&read)[READS], REAL&) {
    s = then(p, s, read);
    return last(s, 0);
}

#else

// Reads x, dy, y and the y before; carries exp(y[t-1] - y[t]) G.
constexpr int READS = 4, WORDS = 2;
struct Total { REAL factor, end; };
typedef REAL State;
__device__ Total identity() { return {1, 0}; }
__device__ Total then(Total a, Total b) { return {a.factor * b.factor, b.factor * a.end + b.end}; }
__device__ Total then(const Params& p, Total a, const REAL (&read)[READS]) {
    REAL fade = ratio(read[3], read[2]);
    return {a.factor * fade, fade * (read[1] + a.end)};
}
__device__ State start(REAL given, bool there) { return there ? given : (REAL)0; }
__device__ State after(State s, Total t) { return t.factor * s + t.end; }
__device__ REAL step(const Params& p, State& s, const REAL (&read)[READS], REAL&) {
    REAL total = read[1] + s, x = read[0];
    s = ratio(read[3], read[2]) * total;
    return x == -(REAL)(1.0f / 0.0f) ? (REAL)0 : ratio(x, read[2]) * total;
}
__device__ REAL last(State s, REAL) { return s; }

#endif

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

union Words {
    Total total;
    REAL of[WORDS];
    __device__ Words() {}
};

constexpr int AT_ONCE = THREADS / COLS;

struct Exchange {
    REAL of[2][WORDS][VEC][THREADS];
};

__device__ __forceinline__ void put(Exchange& shared, int half, const Total (&totals)[VEC]) {
#pragma unroll
    for (int v = 0; v < VEC; ++v) {
        Words words;
        words.total = totals[v];
#pragma unroll
        for (int w = 0; w < WORDS; ++w) shared.of[half][w][v][threadIdx.x] = words.of[w];
    }
}

__device__ __forceinline__ Total get(const Exchange& shared, int half, int v, int thread) {
    Words words;
#pragma unroll
    for (int w = 0; w < WORDS; ++w) words.of[w] = shared.of[half][w][v][thread];
    return words.total;
}

// Composes the threads of a column in their order: those before each, and all. (Hillis and Steele 1986.)
__device__ void across(Exchange& shared, Total (&own)[VEC], Total (&earlier)[VEC], Total (&all)[VEC]) {
    int half = 0, thread = threadIdx.x;
    __syncthreads();
    put(shared, half, own);
    __syncthreads();
    for (int apart = COLS; apart < THREADS; apart *= 2, half ^= 1) {
#pragma unroll
        for (int v = 0; v < VEC; ++v)
            if (thread >= apart) own[v] = then(get(shared, half, v, thread - apart), own[v]);
        put(shared, half ^ 1, own);
        __syncthreads();
    }
#pragma unroll
    for (int v = 0; v < VEC; ++v) {
        earlier[v] = thread >= COLS ? get(shared, half, v, thread - COLS) : identity();
        all[v] = get(shared, half, v, THREADS - COLS + thread % COLS);
    }
}

// The totals of tile or group `i` of this row and these columns: groups come after the tiles.
__device__ __forceinline__ i64 slot(const Params& p, const Place& at, i64 i) {
    return (at.row * p.columns + at.column) * (p.tiles + p.groups) + i;
}

__device__ __forceinline__ REAL* words(const Params& p, const Place& at, i64 i, int w) {
    return p.totals + ((slot(p, at, i) * WORDS + w) * COLS + threadIdx.x % COLS) * VEC;
}

__device__ void publish(const Params& p, const Place& at, i64 i, const Total (&totals)[VEC]) {
    if (threadIdx.x < COLS) {
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
            REAL of[VEC];
#pragma unroll
            for (int v = 0; v < VEC; ++v) {
                Words words;
                words.total = totals[v];
                of[v] = words.of[w];
            }
            store(of, words(p, at, i, w));
        }
        __threadfence();
    }
    __syncthreads();
    if (threadIdx.x == 0) *(volatile unsigned*)(p.published + slot(p, at, i)) = 1;
}

// Past the first-level caches, which do not see what other multiprocessors write.
__device__ __forceinline__ void fetch(const REAL* from, REAL (&to)[VEC]) {
    if constexpr (VEC * sizeof(REAL) % 16 == 0) {
#pragma unroll
        for (int v = 0; v < VEC; v += 16 / sizeof(REAL)) {
            unsigned raw[4];
            asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(raw[0]), "=r"(raw[1]), "=r"(raw[2]), "=r"(raw[3]) : "l"(from + v) : "memory");
            memcpy(&to[v], raw, 16);
        }
    } else {
#pragma unroll
        for (int v = 0; v < VEC; ++v) to[v] = *(const volatile REAL*)(from + v);
    }
}

// Waits for `count` tiles or groups from `from` on and composes them.
__device__ void collect(const Params& p, const Place& at, i64 from, i64 count, Exchange& shared, Total (&all)[VEC]) {
    for (i64 i = threadIdx.x; i < count; i += THREADS) {
        while (!*(volatile unsigned*)(p.published + slot(p, at, from + i))) {
        }
        __threadfence();
    }
    __syncthreads();
    i64 each = (count + AT_ONCE - 1) / AT_ONCE, begin = threadIdx.x / COLS * each;
    Total own[VEC], earlier[VEC];
#pragma unroll
    for (int v = 0; v < VEC; ++v) own[v] = identity();
    for (i64 i = begin; i < begin + each && i < count; ++i) {
        REAL of[WORDS][VEC];
#pragma unroll
        for (int w = 0; w < WORDS; ++w) fetch(words(p, at, from + i, w), of[w]);
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
            Words words;
#pragma unroll
            for (int w = 0; w < WORDS; ++w) words.of[w] = of[w][v];
            own[v] = then(own[v], words.total);
        }
    }
    across(shared, own, earlier, all);
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

    Total own[VEC], earlier[VEC], tile[VEC];
#pragma unroll
    for (int v = 0; v < VEC; ++v) own[v] = identity();
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
    across(shared, own, earlier, tile);

    State state[VEC];
#pragma unroll
    for (int v = 0; v < VEC; ++v)
        state[v] = start(at.inside && p.start ? p.start[at.row * p.width + at.channel + v] : (REAL)0, p.start);
    if (p.tiles > 1) {
        publish(p, at, at.tile, tile);
        i64 group = at.tile / GROUP, of_group = at.tile % GROUP;
        Total in_group[VEC], groups[VEC];
        collect(p, at, group * GROUP, of_group, shared, in_group);
        if (of_group == GROUP - 1 && group < p.groups) {
#pragma unroll
            for (int v = 0; v < VEC; ++v) tile[v] = then(in_group[v], tile[v]);
            publish(p, at, p.tiles + group, tile);
        }
        if (group > 0) {
            collect(p, at, p.tiles, group, shared, groups);
#pragma unroll
            for (int v = 0; v < VEC; ++v) state[v] = after(state[v], groups[v]);
        }
#pragma unroll
        for (int v = 0; v < VEC; ++v) state[v] = after(state[v], in_group[v]);
    }
#pragma unroll
    for (int v = 0; v < VEC; ++v) state[v] = after(state[v], earlier[v]);

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
