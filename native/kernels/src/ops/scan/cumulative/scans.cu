// Cumulative products, sums and log-sums, and their gradients, in one pass over memory. The formulas are in
// mod.rs; cuda.rs chooses the macros:
//   SCAN       PRODUCT, EXP_PRODUCT (by logarithms), SUM or LOG_SUM_EXP
//   GRADIENT   0 the scan, 1 its gradient: time runs the other way
//   Y          the type of the scan's y
//   VEC        neighbouring channels of a thread
//   COLS       threads across channels; the others are at successive times
//   ROWS       steps of a thread
//   THREADS    threads of a block
//   BLOCKS     resident blocks of a multiprocessor
//   STAGES     tiles in shared memory: the one being processed, and prefetched ones
//   OWN        whether each thread prefetches the data that it uses
//   CLUSTERED  whether blocks of a cluster share a row, at most MOST_BLOCKS of them
//
// A block walks through time over some columns of a row, tile by tile, and prefetches the next tiles while it processes
// one: its threads compose the totals of their steps, exchange the prefixes before them, and scan their steps from
// there. For few rows, the blocks of a cluster take adjacent tiles and exchange their totals. The order of composition
// is fixed, so results are reproducible.

#define PRODUCT 0
#define EXP_PRODUCT 1
#define SUM 2
#define LOG_SUM_EXP 3

typedef unsigned long long u64;

__device__ __forceinline__ float exponential(float v) { return expf(v); }
__device__ __forceinline__ double exponential(double v) { return exp(v); }
__device__ __forceinline__ float logarithm(float v) { return logf(v); }
__device__ __forceinline__ double logarithm(double v) { return log(v); }

// Not fmin and fmax, which drop NaN.
__device__ __forceinline__ REAL bounded(REAL v, REAL low, REAL high) { return v < low ? low : v > high ? high : v; }

// exp(a - b), 1 for equal infinities.
__device__ __forceinline__ REAL ratio(REAL a, REAL b) { return a == b ? (REAL)1 : exponential(a - b); }

// A product of many factors, in double: it may leave the range of float before another factor brings it back. 0 times a
// product that overflowed is 0.
__device__ __forceinline__ double times(double a, double b) {
    return a == 0 && (b == 1.0 / 0.0 || b == -1.0 / 0.0) ? 0 : a * b;
}

// Whether `v` is NaN, by the upper word alone: arithmetic gives quiet NaNs, which set these bits.
__device__ __forceinline__ bool is_none(double v) { return (__double2hiint(v) & 0x7fffffff) >= 0x7ff80000; }

// The parts of a scan:
//   READS       values of a step that are read, by `read` in copies.cu
//   Total       the total of a range of steps: `identity`, `then` of two totals, and of a total and a step
//   State       the carry between steps: `start` from initial_state, `after` a total, `last` as last_state
//   step        advances the state by a step, and returns its result

#if SCAN == PRODUCT && !GRADIENT

constexpr int READS = 1;
struct Total { double factor; };
typedef REAL State;
__device__ Total identity() { return {1}; }
__device__ Total then(Total a, Total b) { return {times(a.factor, b.factor)}; }
__device__ Total swift(Total a, Total b) { return {a.factor * b.factor}; }
__device__ bool is_odd(Total t) { return is_none(t.factor); }
__device__ Total then(const Params& p, Total a, const REAL (&read)[READS]) { return {a.factor * read[0]}; }
__device__ State start(REAL given, bool there) { return there ? given : (REAL)1; }
__device__ State after(State s, Total t) { return (REAL)times(s, t.factor); }
__device__ REAL step(const Params& p, State& s, const REAL (&read)[READS], REAL&) { return s *= read[0]; }
__device__ REAL last(State s, REAL) { return s; }

#elif SCAN == PRODUCT

// Reads gamma, dy and y of the step before; carries gamma T.
constexpr int READS = 3;
struct __attribute__((packed, aligned(4))) Total { double factor; REAL end; };
typedef REAL State;
__device__ Total identity() { return {1, 0}; }
__device__ State after(State s, Total t) { return (REAL)times(s, t.factor) + t.end; }
__device__ Total then(Total a, Total b) { return {times(a.factor, b.factor), after(a.end, b)}; }
__device__ Total swift(Total a, Total b) { return {a.factor * b.factor, (REAL)(a.end * b.factor) + b.end}; }
__device__ bool is_odd(Total t) { return is_none(t.factor) || t.end != t.end; }
__device__ Total then(const Params& p, Total a, const REAL (&read)[READS]) {
    return {a.factor * read[0], read[0] * (read[1] + a.end)};
}
__device__ State start(REAL given, bool there) { return there ? given : (REAL)0; }
__device__ REAL step(const Params& p, State& s, const REAL (&read)[READS], REAL&) {
    REAL total = read[1] + s;
    s = read[0] * total;
    return read[2] * total;
}
__device__ REAL last(State s, REAL) { return s; }

#elif SCAN == EXP_PRODUCT && !GRADIENT

// Reads the logarithm of the factor.
constexpr int READS = 1;
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

#elif SCAN == EXP_PRODUCT

// Reads gamma, dy, dlog_y and y of the step before; carries f T and the sum of dlog_y.
constexpr int READS = 4;
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

#elif SCAN == SUM

// The sum. It is its own gradient, which reads dy.
constexpr int READS = 1;
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

// The maximum, and the sum of exp(x - maximum).
constexpr int READS = 1;
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

// Reads x, dy, y and y of the step before; carries exp(y[t-1] - y[t]) G.
constexpr int READS = 4;
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
