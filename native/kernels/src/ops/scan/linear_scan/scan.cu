// The linear recurrence and its gradient. The formulas are in mod.rs; cuda.rs chooses the macros:
//   BACKWARD   0 the recurrence, 1 its gradient: time runs backwards
//   ENDS       0 writes the outputs, 1 finds each chunk's last state from an initial state of zero
//   CUT        whether states into chunks were computed beforehand: by ENDS, and by carry.cu
//
// A thread is one channel of one batch over one chunk of time; neighbouring threads are neighbouring channels. Loads of
// several steps are issued together: whole tiles have no masks, which would part them.

constexpr int STEPS = 8;

// The state before the first step of a chunk, or backwards a[t+1] g[t+1] of the step after its last one.
__device__ __forceinline__ REAL start(const Params& p, i64 id, i64 row) {
    const REAL* initial = BACKWARD ? p.dlast_state : p.initial_state;
    if (ENDS) return 0;
    if (CUT) return p.ends[id];
    return initial ? initial[row] : REAL(0);
}

struct Scan {
    const Params& p;
    i64 row, at, stride; // of the next step
    REAL state;
    // In f32, products of numbers just below 1 would be rounded down more often than up.
    double product;

    // The state before a step, of which only the first of a sequence has none that is stored.
    __device__ __forceinline__ REAL before(i64 at, bool is_first) const {
        if (!is_first) return widen(p.h[at - p.channels]);
        return p.initial_state ? p.initial_state[row] : REAL(0);
    }

    // Goes through the next `count` steps, with WHOLE as many as a tile has. None of those is a sequence's first one.
    template <bool WHOLE>
    __device__ __forceinline__ void tile(int count, bool has_first) {
        REAL a[STEPS], in[STEPS], h[STEPS];
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            if (!WHOLE && s >= count) continue;
            i64 here = at + s * stride;
            a[s] = widen(p.a[here]);
            in[s] = widen((BACKWARD ? p.dh : p.b)[here]);
            if (BACKWARD && !ENDS) h[s] = before(here, !WHOLE && has_first && s == count - 1);
        }
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            if (WHOLE || s < count) step(at + s * stride, a[s], in[s], h[s]);
        }
        at += STEPS * stride;
    }

    __device__ __forceinline__ void step(i64 here, REAL a, REAL in, REAL h) {
        product *= a;
        if (BACKWARD) {
            REAL g = in + state;
            if (!ENDS) narrow(g, p.db[here]), narrow(g * h, p.da[here]);
            state = a * g;
        } else {
            state = a * state + in;
            if (!ENDS) narrow(state, p.to[here]);
        }
    }
};

extern "C" __global__ void linear_scan(Params p) {
    i64 id = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    i64 rows = p.batch * p.channels;
    if (id >= rows * p.chunks) return;
    i64 row = id % rows, chunk = id / rows;
    i64 first = chunk * p.chunk;
    i64 last = first + p.chunk < p.length ? first + p.chunk : p.length;
    i64 base = row / p.channels * p.length * p.channels + row % p.channels;
    i64 at = base + (BACKWARD ? last - 1 : first) * p.channels;
    Scan scan = {p, row, at, BACKWARD ? -p.channels : p.channels, start(p, id, row), 1};
    i64 left = last - first;
    for (; left > STEPS; left -= STEPS) scan.tile<true>(STEPS, false);
    if (left > 0) scan.tile<false>(left, first == 0);
#if ENDS
    p.products[id] = REAL(scan.product);
    p.ends[id] = scan.state;
#else
    REAL* to = BACKWARD ? p.dinitial_state : p.last_state;
    if (to && chunk == (BACKWARD ? 0 : p.chunks - 1)) to[row] = scan.state;
#endif
}
