// The gradient of the selective scan, after common.cu. The formula is in backward.rs;
// cuda/backward.rs chooses the macros:
//   N       states of this launch           K, P   states per thread, threads per channel (K P >= N)
//   M       channels per thread             WARPS  warps per block
//   MIN     blocks that a multiprocessor must have room for
//   CONSTANT_B, CONSTANT_C   B and C are (D, N) rather than shared by all channels of the block
//   RAGGED  whether some threads have channels that are not there
//   HAS_D, HAS_Z, HAS_BIAS, SOFTPLUS, CLAMP, MASK, DSTATES, SLABS   what the call asks for
//   CHUNKED whether time is cut into chunks that know nothing of each other until `compose`
//   PASS    1 forwards, for the states at the starts of tiles and for where chunks end; 2 backwards
//
// A thread holds K states of M channels, and a warp 32 / P groups of such threads. Sums over the
// states of a channel and over channels are mostly sums in a thread; the rest are shuffles.
//
// The second pass goes through tiles of TILE steps from the last to the first, and in each of them
// forwards to the start of every SUB steps, whose states go to shared memory; then backwards: SUB
// steps forwards again with all that is needed of them in registers, and back through them. Every
// decay is computed three times, which is cheaper than to keep it.
//
// A chunk's first pass also finds the adjoint that it hands to the chunk before it: a[1] g[1] is the
// sum of a[1] ... a[t] v[t] over the steps, if none comes from behind, and that can be summed
// forwards. `compose.cu` makes states and adjoints of all chunks true.
//
// Limits and history, f32 on an H200 (132 multiprocessors at 1.98 GHz), ms for B x L x D x N of
//                       32x60x512x16  1x2048x1536x16  8x2048x2048x16  8x2048x5120x16
//   bytes at 4.2 TB/s   0.0048        0.015           0.161           0.401
//   3 exp, 16 a clock/SM 0.0113       0.036           0.385           0.963
//   instructions, 38 a state and step (11.5 in pass 1, 26.5 in pass 2), 4 a clock and multiprocessor
//                       0.018         0.057           0.610           1.53
//   version 1           0.106         0.243           1.820           6.07
//     as above; addresses worked out for every element, too few chunks
//   version 2           0.062         0.211           1.508           3.46
//     running places, first terms of sums without a zero before them
//   version 3           0.065         0.189           1.274           3.40
//     loads of a tile's start together, the next tile announced, better chosen layouts
// Pass 2 issues in about half of all clocks: its two warps a scheduler wait for shuffles,
// exponentials and loads from shared memory, and there are no registers for more.
// Tried in vain: all shuffles of SUB steps together (1.67 for the third shape: registers spill); two
// channels a thread and three warps a scheduler, which is as fast; decays computed once more in place
// of kept, so that four warps a scheduler fit with two channels a thread (1.25) and three with four (1.51).

constexpr int THREADS = 32 * WARPS;
constexpr int GROUPS = 32 / P;
// Channels of a warp, states with those that only pad.
constexpr int WIDTH = M * GROUPS, PADDED = K * P;
// Of as many steps of all channels of a warp a thread prepares, and finishes, so many.
template <int STEPS> constexpr int SHARE = (STEPS * WIDTH + 31) / 32;
// The channels among these.
constexpr int OWN = WIDTH > 32 ? WIDTH / 32 : 1;
constexpr int SLOT = SUB * 2 > WIDTH ? SUB * 2 * PADDED : PADDED * WIDTH;

template <int C> struct __align__(C * sizeof(REAL)) Pack { REAL v[C]; };

template <int C>
__device__ __forceinline__ void load(REAL (&to)[C], const REAL* from) {
    Pack<C> pack = *(const Pack<C>*)from;
#pragma unroll
    for (int i = 0; i < C; i++) to[i] = pack.v[i];
}

template <int C>
__device__ __forceinline__ void store(REAL* to, const REAL (&from)[C]) {
    Pack<C> pack;
#pragma unroll
    for (int i = 0; i < C; i++) pack.v[i] = from[i];
    *(Pack<C>*)to = pack;
}

// Sums each of V values of each set over LANES lanes that are STRIDE apart, of which this one is
// number `rank`: it ends with those from value `rank * V / LANES` on. All sets go together, since
// each shuffle takes long and they are done in this order.
template <int LANES, int STRIDE, int SETS, int V, int LEFT = V>
__device__ __forceinline__ void sum_over(REAL (&v)[SETS][V], int rank) {
    if constexpr (LANES > 1) {
        constexpr int HALF = LANES / 2, MOVED = LEFT > 1 ? LEFT / 2 : 1;
        bool upper = rank & HALF;
        REAL got[SETS][MOVED];
#pragma unroll
        for (int set = 0; set < SETS; set++) {
#pragma unroll
            for (int i = 0; i < MOVED; i++) {
                REAL send = LEFT == 1 || upper ? v[set][i] : v[set][i + MOVED];
                got[set][i] = __shfl_xor_sync(0xffffffff, send, HALF * STRIDE);
            }
        }
#pragma unroll
        for (int set = 0; set < SETS; set++) {
#pragma unroll
            for (int i = 0; i < MOVED; i++) v[set][i] = (LEFT > 1 && upper ? v[set][i + MOVED] : v[set][i]) + got[set][i];
        }
        sum_over<HALF, STRIDE, SETS, V, MOVED>(v, rank);
    }
}

// a b + sum, where there is a sum already.
__device__ __forceinline__ REAL plus(bool first, REAL a, REAL b, REAL sum) { return first ? a * b : fma(a, b, sum); }

// v, but the largest number where it is above: times zero that stays zero.
__device__ __forceinline__ float finite(float v) {
#if __CUDA_ARCH__ >= 800
    asm("min.NaN.f32 %0, %0, %1;" : "+f"(v) : "f"(3.402823466e38f));
    return v;
#else
    return v > 3.402823466e38f ? 3.402823466e38f : v;
#endif
}
__device__ __forceinline__ double finite(double v) {
    return v > 1.7976931348623157e308 ? 1.7976931348623157e308 : v;
}

__device__ __forceinline__ REAL sigmoid(REAL v) {
    return reciprocal(REAL(1) + exp2_fast(-v * REAL(LOG2_E)));
}

// How step_size changes with its argument. Both bounds of the clamp are inside.
__device__ __forceinline__ REAL step_slope(REAL v, REAL bias, REAL lo, REAL hi) {
    if (HAS_BIAS) v += bias;
    REAL slope = SOFTPLUS ? sigmoid(v) : REAL(1);
    if (CLAMP && MASK) {
        REAL size = SOFTPLUS ? softplus(v) : v;
        if (size < lo || size > hi) slope = 0;
    }
    return slope;
}

// One warp's memory.
struct Warp {
    REAL delta[TILE][WIDTH], x[TILE][WIDTH];
    REAL dy[PASS == 1 ? STAGE : SUB][WIDTH];
    REAL sums[PASS == 1 ? 1 : 2 + HAS_Z][SUB][WIDTH];
    // States at the start of every SUB steps; then what these steps add to dB and dC.
    REAL slots[PASS == 1 ? 1 : TILE / SUB][PASS == 1 ? 4 : SLOT];
};

struct Shared {
    REAL b[PASS == 1 ? 2 * STAGE : TILE][PADDED], c[PASS == 1 ? 2 * STAGE : TILE][PADDED];
    Warp warps[WARPS];
};

// Where a thread is. As little as can be, since it stays in registers.
struct Place {
    // The warp's first channel, and how many there are from there on.
    i64 channel;
    int left;
    int lane;
    // Its group of threads in the warp, and its place in that.
    int group, rank;

    // The block among all that channels are cut into.
    static __device__ __forceinline__ unsigned block(const Params& p) {
        return blockIdx.x % (p.sections * p.section_blocks);
    }

    __device__ __forceinline__ Place(const Params& p) {
        unsigned block = Place::block(p), section = 0;
        if (p.sections > 1) section = block / p.section_blocks, block -= section * p.section_blocks;
        i64 within = (i64)block * (WARPS * WIDTH) + threadIdx.x / 32 * WIDTH, rest = p.section - within;
        channel = section * p.section + within;
        left = rest < WIDTH ? (int)rest : WIDTH;
        lane = threadIdx.x % 32, group = lane / P, rank = lane % P;
    }

    // The block's first channel.
    __device__ __forceinline__ i64 corner() const { return channel - threadIdx.x / 32 * WIDTH; }

    // Channel m of this thread within the warp; whether it exists.
    __device__ __forceinline__ int local(int m) const { return group * M + m; }
    __device__ __forceinline__ bool alive(int m) const { return local(m) < left; }
    // Of the elements of some steps and all channels of the warp, each thread owns every 32nd: the step
    // and the channel of its element i, where the first lies behind the row of the first step, and how
    // far element i lies behind that.
    __device__ __forceinline__ int step(int i) const { return WIDTH > 32 ? i / OWN : i * (32 / WIDTH) + lane / WIDTH; }
    __device__ __forceinline__ int owned(int i) const { return WIDTH > 32 ? i % OWN * 32 + lane : lane % WIDTH; }
    __device__ __forceinline__ i64 first(const Params& p) const { return step(0) * p.channels + channel + owned(0); }
    __device__ __forceinline__ i64 behind(const Params& p, int i) const {
        return WIDTH > 32 ? i / OWN * p.channels + i % OWN * 32 : i * (32 / WIDTH) * p.channels;
    }
    __device__ __forceinline__ bool mine(int i) const { return owned(i) < left; }
    // Whether there is an element i among so many steps, and whether it is one of `left` that are there.
    template <int STEPS>
    __device__ __forceinline__ bool among(int i) const { return STEPS * WIDTH % 32 == 0 || step(i) < STEPS; }
    template <int STEPS, bool WHOLE>
    __device__ __forceinline__ bool has(int i, int left) const {
        return among<STEPS>(i) && (!RAGGED || mine(i)) && (WHOLE || step(i) < left);
    }
};

// Some steps of B or C on their way into shared memory, shared by the threads of the block.
template <int STEPS>
struct Rows {
    static constexpr int COUNT = (STEPS * PADDED + THREADS - 1) / THREADS;
    STORAGE v[COUNT];

    // `left` counts the steps that there are.
    __device__ __forceinline__ void fetch(const STORAGE* from, i64 stride, int left) {
        int step = threadIdx.x / PADDED, n = threadIdx.x % PADDED;
        const STORAGE* row = from + step * stride + n;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            if (THREADS % PADDED != 0) {
                step = (threadIdx.x + i * THREADS) / PADDED, n = (threadIdx.x + i * THREADS) % PADDED;
                row = from + step * stride + n;
            }
            v[i] = {};
            if (step < left && (PADDED == N || n < N)) v[i] = *row;
            step += THREADS / PADDED, row += THREADS / PADDED * stride;
        }
    }

    __device__ __forceinline__ void spread(REAL (*to)[PADDED]) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            int element = threadIdx.x + i * THREADS;
            if (STEPS * PADDED % THREADS == 0 || element < STEPS * PADDED) to[0][element] = widen(v[i]);
        }
    }
};

// Some steps of x, dt, dy or z, of those that this thread prepares.
template <int STEPS>
struct Column {
    static constexpr int COUNT = SHARE<STEPS>;
    STORAGE v[COUNT] = {};

    // `from` is where the thread's first element lies; `left` counts the steps that there are.
    template <bool WHOLE>
    __device__ __forceinline__ void fetch(const STORAGE* from, const Params& p, const Place& at, int left) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            v[i] = {};
            if (at.template has<STEPS, WHOLE>(i, left)) v[i] = from[at.behind(p, i)];
        }
    }
};

__device__ __forceinline__ int at_most(int most, i64 left) { return left < 0 ? 0 : left < most ? (int)left : most; }

// What both passes have of a thread.
struct Thread {
    const Params& p;
    Shared& shared;
    Warp& warp;
    Place at;
    bool wide;
    REAL a[M][K], bias[OWN];
    REAL b_row[CONSTANT_B ? M : 1][K], c_row[CONSTANT_C ? M : 1][K];
    REAL lo, hi;

    __device__ __forceinline__ Thread(const Params& p, Shared& shared)
        : p(p), shared(shared), warp(shared.warps[threadIdx.x / 32]), at(p) {
        wide = p.state % UNIT == 0;
        lo = p.lo, hi = p.hi;
#pragma unroll
        for (int m = 0; m < M; m++) {
            i64 row = (at.channel + at.local(m)) * p.state + p.first_state + at.rank * K;
            read(a[m], p.a + row, m, wide);
            if constexpr (CONSTANT_B) read_narrow(b_row[m], p.b + row, m);
            if constexpr (CONSTANT_C) read_narrow(c_row[m], p.c + row, m);
#pragma unroll
            for (int k = 0; k < K; k++) a[m][k] *= REAL(LOG2_E);
        }
#pragma unroll
        for (int i = 0; i < OWN; i++) bias[i] = HAS_BIAS && at.mine(i) ? p.dt_bias[at.channel + at.owned(i)] : REAL(0);
    }

    __device__ __forceinline__ void read(REAL (&to)[K], const REAL* row, int m, bool wide) {
#pragma unroll
        for (int k = 0; k < K; k++) to[k] = 0;
        if (at.alive(m)) load_row(to, row, at.rank, wide);
    }

    __device__ __forceinline__ void read_narrow(REAL (&to)[K], const STORAGE* row, int m) {
#pragma unroll
        for (int k = 0; k < K; k++) to[k] = at.alive(m) && exists(at.rank, k) ? widen(row[k]) : REAL(0);
    }

    // Where channel m lies in an array of (rows, D), and its states in one of (rows, D, N).
    __device__ __forceinline__ i64 flat(i64 row, int m) { return row * p.channels + at.channel + at.local(m); }
    __device__ __forceinline__ i64 states(i64 row, int m) { return flat(row, m) * N + at.rank * K; }
    __device__ __forceinline__ i64 all_states(i64 row, int m) {
        return flat(row, m) * p.state + p.first_state + at.rank * K;
    }

    __device__ __forceinline__ const STORAGE* rows(const STORAGE* from, i64 groups, i64 share, i64 time) {
        i64 group = groups > 1 ? at.corner() / share : 0;
        return from + (time * groups + group) * p.state + p.first_state;
    }

    // The dt and x of some steps as the steps need them, from `step` of the tile on.
    template <int STEPS>
    __device__ __forceinline__ void prepare(const Column<STEPS>& dt, const Column<STEPS>& x, int step, int left) {
#pragma unroll
        for (int i = 0; i < Column<STEPS>::COUNT; i++) {
            if (!at.template among<STEPS>(i)) continue;
            REAL delta = step_size(widen(dt.v[i]), bias[i % OWN], lo, hi);
            // A step or a channel that is not there does nothing, and can spoil nothing.
            warp.delta[step + at.step(i)][at.owned(i)] = at.template has<STEPS, false>(i, left) ? delta : REAL(0);
            warp.x[step + at.step(i)][at.owned(i)] = widen(x.v[i]);
        }
    }

    template <int STEPS>
    __device__ __forceinline__ void prepare_dy(const Column<STEPS>& dy, const Column<STEPS>& z) {
#pragma unroll
        for (int i = 0; i < Column<STEPS>::COUNT; i++) {
            if (!at.template among<STEPS>(i)) continue;
            REAL v = widen(dy.v[i]);
            warp.dy[at.step(i)][at.owned(i)] = HAS_Z ? v * silu(widen(z.v[i])) : v;
        }
    }

    // The decay of state k of channel m over delta.
    __device__ __forceinline__ REAL decay(REAL delta, int m, int k) { return exp2_fast(delta * a[m][k]); }
    // What is not there must not spoil the sums, whatever B and C are.
    __device__ __forceinline__ bool there(int m, int k) { return (!RAGGED || at.alive(m)) && exists(at.rank, k); }

    __device__ __forceinline__ void load_b(REAL (&b)[K], int row) {
        if constexpr (!CONSTANT_B) load(b, &shared.b[row][at.rank * K]);
    }
    __device__ __forceinline__ void load_c(REAL (&c)[K], int row) {
        if constexpr (!CONSTANT_C) load(c, &shared.c[row][at.rank * K]);
    }
    __device__ __forceinline__ REAL b_of(const REAL (&b)[K], int m, int k) {
        if constexpr (CONSTANT_B) return b_row[m][k];
        else return b[k];
    }
    __device__ __forceinline__ REAL c_of(const REAL (&c)[K], int m, int k) {
        if constexpr (CONSTANT_C) return c_row[m][k];
        else return c[k];
    }
};

#if PASS == 1

struct Ends : Thread {
    REAL h[M][K] = {}, product[CHUNKED ? M : 1][K], adjoint[CHUNKED ? M : 1][K] = {}, sum[M] = {};
    i64 batch, j;
    // Where the next steps lie.
    i64 place;
    const STORAGE *from_b, *from_c;
    Column<STAGE> x, dt, dy, z;
    Rows<STAGE> b, c;

    __device__ __forceinline__ Ends(const Params& p, Shared& shared, i64 batch, i64 j) : Thread(p, shared), batch(batch), j(j) {
#pragma unroll
        for (int m = 0; m < M; m++) {
            if (!CHUNKED && p.initial_state) read(h[m], p.initial_state + all_states(batch, m), m, wide);
#pragma unroll
            for (int k = 0; k < K; k++)
                if constexpr (CHUNKED) product[m][k] = 1;
        }
    }

    template <bool WHOLE>
    __device__ __forceinline__ void fetch_columns(i64 place, int left) {
        x.template fetch<WHOLE>(p.x + place, p, at, left);
        dt.template fetch<WHOLE>(p.dt + place, p, at, left);
        if (CHUNKED) dy.template fetch<WHOLE>(p.dy + place, p, at, left);
        if (CHUNKED && HAS_Z) z.template fetch<WHOLE>(p.z + place, p, at, left);
    }

    // Brings the next steps on their way.
    __device__ __forceinline__ void fetch(int left) {
        if (left == STAGE) fetch_columns<true>(place, left);
        else fetch_columns<false>(place, left);
        place += STAGE * p.channels;
        if (!CONSTANT_B) b.fetch(from_b, p.groups_b * p.state, left), from_b += STAGE * p.groups_b * p.state;
        if (CHUNKED && !CONSTANT_C) c.fetch(from_c, p.groups_c * p.state, left), from_c += STAGE * p.groups_c * p.state;
    }

    __device__ __forceinline__ void step(int s, int row, i64 t) {
        REAL delta[M], x[M], dy[M], b[K], c[K];
        load(delta, &warp.delta[s][at.local(0)]);
        load(x, &warp.x[s][at.local(0)]);
        load_b(b, row);
        if constexpr (CHUNKED) load(dy, &warp.dy[s][at.local(0)]), load_c(c, row);
#pragma unroll
        for (int m = 0; m < M; m++) {
            REAL u = delta[m] * x[m], from_states[K];
            if (DSTATES && CHUNKED) read(from_states, p.dstates + all_states(batch * p.length + t, m), m, wide);
            sum[m] += delta[m];
#pragma unroll
            for (int k = 0; k < K; k++) {
                REAL kept = decay(delta[m], m, k);
                h[m][k] = fma(kept, h[m][k], there(m, k) ? u * b_of(b, m, k) : REAL(0));
                if constexpr (CHUNKED) {
                    product[m][k] = finite(product[m][k] * kept);
                    REAL v = dy[m] * c_of(c, m, k);
                    if (DSTATES) v += from_states[k];
                    adjoint[m][k] = fma(product[m][k], v, adjoint[m][k]);
                }
            }
        }
    }

    // Keeps the state behind a tile.
    __device__ __forceinline__ void keep(i64 tile, bool last) {
        i64 row = tile * p.batch + batch;
#pragma unroll
        for (int m = 0; m < M; m++) {
            if (!at.alive(m)) continue;
            if (!last) store_row(p.bounds + states(row, m), h[m], at.rank, true);
            if (CHUNKED && at.rank == 0) p.passed[flat(row, m)] = sum[m];
        }
    }

    __device__ __forceinline__ void run() {
        i64 begin = j * p.chunk, end = begin + p.chunk < p.length ? begin + p.chunk : p.length;
        i64 time = batch * p.length + begin;
        int buffer = 0;
        place = time * p.channels + at.first(p);
        from_b = rows(p.b, p.groups_b, p.share_b, time), from_c = rows(p.c, p.groups_c, p.share_c, time);
        fetch(at_most(STAGE, end - begin));
        for (i64 t = begin; t < end; t += STAGE, buffer ^= STAGE) {
            int left = at_most(STAGE, end - t);
            if (t > begin && t % TILE == 0) keep(t / TILE - 1, false);
            // One barrier is enough: the rows of B and C written now were last read before the one before.
            __syncwarp();
            prepare(dt, x, 0, left);
            if constexpr (CHUNKED) prepare_dy(dy, z);
            if (!CONSTANT_B) b.spread(shared.b + buffer);
            if (CHUNKED && !CONSTANT_C) c.spread(shared.c + buffer);
            __syncthreads();
            if (t + STAGE < end) fetch(at_most(STAGE, end - t - STAGE));
            if (end - t >= STAGE) {
#pragma unroll
                for (int s = 0; s < STAGE; s++) step(s, buffer + s, t + s);
            } else {
#pragma unroll 1
                for (int s = 0; s < left; s++) step(s, buffer + s, t + s);
            }
        }
        if constexpr (CHUNKED) finish((end - 1) / TILE);
    }

    __device__ __forceinline__ void finish(i64 tile) {
        keep(tile, j + 1 == p.chunks);
        i64 row = j * p.batch + batch;
#pragma unroll
        for (int m = 0; m < M; m++)
            if (at.alive(m)) store_row(p.adjoints + states(row, m), adjoint[m], at.rank, true);
    }
};

#else

template <typename T>
__device__ __forceinline__ void prefetch(const T* from) { asm volatile("prefetch.global.L2 [%0];" : : "l"(from)); }

// Whether dt's gradient is other than delta's.
constexpr bool SLOPE = SOFTPLUS || (CLAMP && MASK);

__device__ __forceinline__ REAL silu_slope(REAL v) {
    REAL s = sigmoid(v);
    return s * fma(v, REAL(1) - s, REAL(1));
}

struct Gradients : Thread {
    // a[t+1] g[t+1], and sums over time.
    REAL carry[M][K], da[M][K] = {}, db[CONSTANT_B ? M : 1][K] = {}, dc[CONSTANT_C ? M : 1][K] = {};
    REAL dd[OWN] = {}, dbias[OWN] = {}, skip[OWN];
    i64 batch, j;
    Column<SUB> dt, dy, z;

    __device__ __forceinline__ Gradients(const Params& p, Shared& shared, i64 j) : Thread(p, shared), j(j) {
#pragma unroll
        for (int i = 0; i < OWN; i++) skip[i] = HAS_D && at.mine(i) ? p.d[at.channel + at.owned(i)] : REAL(0);
    }

    __device__ __forceinline__ i64 time(i64 t) { return batch * p.length + t; }

    // Where the states behind the tile before t lie.
    __device__ __forceinline__ const REAL* bound(i64 t, int m) {
        return p.bounds + states((t / TILE - 1) * p.batch + batch, m);
    }

    // The states in front of the chunk, which starts at `begin`.
    __device__ __forceinline__ void start_chunk(REAL (&h)[M][K], i64 begin) {
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int k = 0; k < K; k++) h[m][k] = 0;
        }
        if (begin > 0) {
#pragma unroll
            for (int m = 0; m < M; m++) read(h[m], bound(begin, m), m, true);
        } else if (p.initial_state) {
#pragma unroll
            for (int m = 0; m < M; m++) read(h[m], p.initial_state + all_states(batch, m), m, wide);
        }
    }

    // The states in front of a tile that starts at t.
    __device__ __forceinline__ void start(REAL (&h)[M][K], i64 t) {
        i64 begin = j * p.chunk;
        if (t == begin) return start_chunk(h, begin);
#pragma unroll
        for (int m = 0; m < M; m++) read(h[m], bound(t, m), m, true);
        if constexpr (CHUNKED) {
            REAL from[M][K], passed[M];
            start_chunk(from, begin);
#pragma unroll
            for (int m = 0; m < M; m++)
                passed[m] = at.alive(m) ? p.passed[flat((t / TILE - 1) * p.batch + batch, m)] : REAL(0);
#pragma unroll
            for (int m = 0; m < M; m++) {
#pragma unroll
                for (int k = 0; k < K; k++) h[m][k] = decayed(passed[m] * a[m][k], from[m][k], h[m][k]);
            }
        }
    }

    // Brings what the tile at t begins with nearer.
    __device__ __forceinline__ void announce(i64 t) {
        i64 row = time(t) + at.lane;
        if (at.left > 0) {
            i64 place = row * p.channels + at.channel;
            prefetch(p.x + place), prefetch(p.dt + place), prefetch(p.dy + place);
            if (HAS_Z) prefetch(p.z + place);
            if (!CONSTANT_B) prefetch(rows(p.b, p.groups_b, p.share_b, row));
            if (!CONSTANT_C) prefetch(rows(p.c, p.groups_c, p.share_c, row));
        }
        if (t == j * p.chunk) return;
#pragma unroll
        for (int m = 0; m < M; m++)
            if (at.alive(m)) prefetch(bound(t, m));
    }

    __device__ __forceinline__ void forwards(i64 t, int left) {
        REAL h[M][K];
        Column<STAGE> x, dt;
        i64 place = time(t) * p.channels + at.first(p);
        fetch_columns(x, dt, place, left);
        start(h, t);
#pragma unroll 1
        for (int s = 0; s < left; s += STAGE) {
            prepare(dt, x, s, left - s);
            __syncwarp();
            place += STAGE * p.channels;
            if (s + STAGE < left) fetch_columns(x, dt, place, left - s - STAGE);
#pragma unroll
            for (int sub = 0; sub < STAGE; sub += SUB) {
                if (s + sub < left) keep(h, (s + sub) / SUB);
                if (s + sub + SUB < left) {
#pragma unroll
                    for (int i = 0; i < SUB; i++) forward(h, s + sub + i);
                }
            }
        }
    }

    __device__ __forceinline__ void fetch_columns(Column<STAGE>& x, Column<STAGE>& dt, i64 place, int left) {
        if (left >= STAGE) {
            x.template fetch<true>(p.x + place, p, at, left);
            dt.template fetch<true>(p.dt + place, p, at, left);
        } else {
            x.template fetch<false>(p.x + place, p, at, left);
            dt.template fetch<false>(p.dt + place, p, at, left);
        }
    }

    __device__ __forceinline__ void keep(const REAL (&h)[M][K], int slot) {
#pragma unroll
        for (int m = 0; m < M; m++) store(&warp.slots[slot][(m * 32 + at.lane) * K], h[m]);
    }

    __device__ __forceinline__ void forward(REAL (&h)[M][K], int s) {
        REAL delta[M], x[M], b[K];
        load(delta, &warp.delta[s][at.local(0)]);
        load(x, &warp.x[s][at.local(0)]);
        load_b(b, s);
#pragma unroll
        for (int m = 0; m < M; m++) {
            REAL u = delta[m] * x[m];
#pragma unroll
            for (int k = 0; k < K; k++) {
                REAL input = there(m, k) ? u * b_of(b, m, k) : REAL(0);
                h[m][k] = fma(decay(delta[m], m, k), h[m][k], input);
            }
        }
    }

    template <bool WHOLE>
    __device__ __forceinline__ void fetch(i64 place, int left) {
        dy.template fetch<WHOLE>(p.dy + place, p, at, left);
        if (SLOPE) dt.template fetch<WHOLE>(p.dt + place, p, at, left);
        if (HAS_Z) z.template fetch<WHOLE>(p.z + place, p, at, left);
    }

    // Sums what two steps give for each of the lane's states over the channels of the warp, and keeps
    // it: which = 0 for dB, 1 for dC.
    __device__ __forceinline__ void over_channels(REAL (&v)[1][2 * K], REAL* slot, int s, int which) {
        sum_over<GROUPS, P>(v, at.group);
        constexpr int LEFT = 2 * K > GROUPS ? 2 * K / GROUPS : 1, SAME = 2 * K > GROUPS ? 1 : GROUPS / (2 * K);
        if (SAME > 1 && at.group % SAME != 0) return;
#pragma unroll
        for (int i = 0; i < LEFT; i++) {
            int index = at.group * (2 * K) / GROUPS + i;
            slot[(((s + index / K) * 2 + which) * P + at.rank) * K + index % K] = v[0][i];
        }
    }

    // Sums what is given for each of the thread's channels over the states, and keeps it: each set
    // APART rows behind the one before.
    template <int APART, int SETS>
    __device__ __forceinline__ void over_states(REAL (&v)[SETS][M], REAL (*sums)[WIDTH]) {
        sum_over<P, 1>(v, at.rank);
        constexpr int LEFT = M > P ? M / P : 1, SAME = M > P ? 1 : P / M;
        if (SAME > 1 && at.rank % SAME != 0) return;
#pragma unroll
        for (int set = 0; set < SETS; set++) {
#pragma unroll
            for (int i = 0; i < LEFT; i++) sums[set * APART][at.group * M + at.rank * M / P + i] = v[set][i];
        }
    }

    // SUB steps from step s of the tile on, which is time t, forwards in registers and then back.
    // `left` counts the steps that there are; WHOLE says that these are enough.
    template <bool WHOLE>
    __device__ __forceinline__ void sub(int s, i64 t, int left) {
        REAL kept[SUB][M][K], grown[SUB][M][K], h[M][K];
        REAL* slot = warp.slots[s / SUB];
#pragma unroll
        for (int m = 0; m < M; m++) load(h[m], slot + (m * 32 + at.lane) * K);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < SUB; i += 2) {
            REAL over[1][2 * K] = {}, y[2][M] = {};
#pragma unroll
            for (int e = 0; e < 2; e++) {
                if (!WHOLE && i + e >= left) continue;
                REAL delta[M], x[M], dy[M], b[K], c[K];
                load(delta, &warp.delta[s + i + e][at.local(0)]);
                load(x, &warp.x[s + i + e][at.local(0)]);
                load(dy, &warp.dy[i + e][at.local(0)]);
                load_b(b, s + i + e);
                if constexpr (HAS_Z) load_c(c, s + i + e);
#pragma unroll
                for (int m = 0; m < M; m++) {
                    REAL u = delta[m] * x[m];
#pragma unroll
                    for (int k = 0; k < K; k++) {
                        REAL a = decay(delta[m], m, k), before = a * h[m][k];
                        kept[i + e][m][k] = a, grown[i + e][m][k] = before;
                        h[m][k] = there(m, k) ? fma(u, b_of(b, m, k), before) : REAL(0);
                        if constexpr (CONSTANT_C) dc[m][k] = fma(dy[m], h[m][k], dc[m][k]);
                        else over[0][e * K + k] = plus(m == 0, dy[m], h[m][k], over[0][e * K + k]);
                        if constexpr (HAS_Z) y[e][m] = plus(k == 0, c_of(c, m, k), h[m][k], y[e][m]);
                    }
                }
            }
            if constexpr (HAS_Z) over_states<1>(y, &warp.sums[2][i]);
            if constexpr (!CONSTANT_C) over_channels(over, slot, i, 1);
        }
        REAL of_b[1][2 * K] = {};
#pragma unroll
        for (int i = SUB - 1; i >= 0; i--) {
            if (!WHOLE && i >= left) continue;
            // What inputs and decays get.
            REAL over[2][M], delta[M], x[M], dy[M], b[K], c[K];
            load(delta, &warp.delta[s + i][at.local(0)]);
            load(x, &warp.x[s + i][at.local(0)]);
            load(dy, &warp.dy[i][at.local(0)]);
            load_b(b, s + i);
            load_c(c, s + i);
#pragma unroll
            for (int m = 0; m < M; m++) {
                REAL u = delta[m] * x[m], from_states[K];
                if (DSTATES) read(from_states, p.dstates + all_states(time(t + i), m), m, wide);
#pragma unroll
                for (int k = 0; k < K; k++) {
                    REAL g = fma(dy[m], c_of(c, m, k), carry[m][k]);
                    if (DSTATES) g += from_states[k];
                    if (!there(m, k)) g = 0;
                    carry[m][k] = kept[i][m][k] * g;
                    REAL w = g * grown[i][m][k], &for_b = of_b[0][i % 2 * K + k];
                    over[1][m] = plus(k == 0, w, a[m][k], over[1][m]);
                    da[m][k] = fma(w, delta[m], da[m][k]);
                    over[0][m] = plus(k == 0, g, b_of(b, m, k), over[0][m]);
                    if constexpr (CONSTANT_B) db[m][k] = fma(g, u, db[m][k]);
                    else for_b = plus(m == 0, g, u, for_b);
                }
            }
            over_states<SUB>(over, &warp.sums[0][i]);
            if constexpr (!CONSTANT_B)
                if (i % 2 == 0) over_channels(of_b, slot, i, 0);
        }
    }

    // Turns the sums over states into gradients. `dy`, `dt` and `z` are those of these steps.
    template <bool WHOLE>
    __device__ __forceinline__ void finish(const Column<SUB>& dy, const Column<SUB>& dt, const Column<SUB>& z, int s, i64 place, int left) {
#pragma unroll
        for (int i = 0; i < Column<SUB>::COUNT; i++) {
            if (!at.template has<SUB, WHOLE>(i, left)) continue;
            int step = at.step(i), owned = at.owned(i);
            i64 flat = place + at.behind(p, i);
            REAL of_input = warp.sums[0][step][owned], of_decay = warp.sums[1][step][owned] * REAL(1 / LOG2_E);
            REAL y = HAS_Z ? warp.sums[HAS_Z ? 2 : 0][step][owned] : REAL(0);
            if (SLABS && !all_slabs(flat, of_input, of_decay, y)) continue;
            REAL delta = warp.delta[s + step][owned], x = warp.x[s + step][owned], gated = warp.dy[step][owned];
            REAL dx = of_input * delta;
            if (HAS_D) dx = fma(skip[i % OWN], gated, dx), dd[i % OWN] = fma(gated, x, dd[i % OWN]);
            narrow(dx, p.dx[flat]);
            REAL ddt = fma(of_input, x, of_decay);
            if (SLOPE) ddt *= step_slope(widen(dt.v[i]), bias[i % OWN], lo, hi);
            narrow(ddt, p.ddt[flat]);
            if (HAS_BIAS) dbias[i % OWN] += ddt;
            if (HAS_Z) {
                if (HAS_D) y = fma(skip[i % OWN], x, y);
                narrow(widen(dy.v[i]) * y * silu_slope(widen(z.v[i])), p.dz[flat]);
            }
        }
    }

    // Adds what the slabs before gave, or leaves it to the next; true if this is the last.
    __device__ __forceinline__ bool all_slabs(i64 flat, REAL& of_input, REAL& of_decay, REAL& y) {
        i64 plane = p.batch * p.length * p.channels;
        REAL* place = p.slabs + flat;
        if (!p.first_slab) {
            of_input += place[0], of_decay += place[plane];
            if (HAS_Z) y += place[2 * plane];
        }
        if (p.last_slab) return true;
        place[0] = of_input, place[plane] = of_decay;
        if (HAS_Z) place[2 * plane] = y;
        return false;
    }

    __device__ __forceinline__ void backwards(i64 t, int count) {
        int s = (count - 1) / SUB * SUB;
        i64 place = time(t + s) * p.channels + at.first(p);
        fetch<false>(place, count - s);
        if (count % SUB != 0) back<false>(s, t, place, count - s), s -= SUB, place -= SUB * p.channels;
#pragma unroll 1
        for (; s >= 0; s -= SUB, place -= SUB * p.channels) back<true>(s, t, place, SUB);
    }

    // From step s of the tile on; `place` is where its first element lies.
    template <bool WHOLE>
    __device__ __forceinline__ void back(int s, i64 t, i64 place, int left) {
        __syncwarp();
        prepare_dy(dy, z);
        Column<SUB> this_dy = dy, this_dt = dt, this_z = z;
        __syncwarp();
        if (s > 0) fetch<true>(place - SUB * p.channels, SUB);
        sub<WHOLE>(s, t + s, left);
        __syncwarp();
        finish<WHOLE>(this_dy, this_dt, this_z, s, place, left);
    }

    // Sums what the warps found for dB and dC of a tile, or what stands for it where several blocks do.
    __device__ __forceinline__ void sum_warps(i64 t, int left) {
        constexpr int PER_STEP = 2 * PADDED;
        for (int i = threadIdx.x; i < left * PER_STEP; i += THREADS) {
            int step = i / PER_STEP, within = i % PER_STEP, which = within / PADDED, n = within % PADDED;
            if (n >= N || (which == 0 ? CONSTANT_B : CONSTANT_C)) continue;
            REAL sum = 0;
#pragma unroll
            for (int w = 0; w < WARPS; w++) sum += shared.warps[w].slots[step / SUB][step % SUB * PER_STEP + within];
            REAL* part = which == 0 ? p.part_b : p.part_c;
            i64 from_first = t + step - p.first_chunk * p.chunk;
            if (part) {
                part[(((i64)Place::block(p) * p.batch + batch) * p.span + from_first) * N + n] = sum;
            } else {
                i64 groups = which == 0 ? p.groups_b : p.groups_c, share = which == 0 ? p.share_b : p.share_c;
                i64 row = time(t + step) * groups + (groups > 1 ? at.corner() / share : 0);
                narrow(sum, (which == 0 ? p.db : p.dc)[row * p.state + p.first_state + n]);
            }
        }
    }

    __device__ __forceinline__ void tile(i64 t, int left) {
        if (!CONSTANT_B) {
            Rows<TILE> b;
            b.fetch(rows(p.b, p.groups_b, p.share_b, time(t)), p.groups_b * p.state, left);
            b.spread(shared.b);
        }
        if (!CONSTANT_C) {
            Rows<TILE> c;
            c.fetch(rows(p.c, p.groups_c, p.share_c, time(t)), p.groups_c * p.state, left);
            c.spread(shared.c);
        }
        __syncthreads();
        forwards(t, left);
        if (t > j * p.chunk) announce(t - TILE);
        backwards(t, left);
        __syncthreads();
        if (!CONSTANT_B || !CONSTANT_C) {
            sum_warps(t, left);
            __syncthreads();
        }
    }

    // One batch, or one chunk of it.
    __device__ __forceinline__ void one(i64 which) {
        batch = which;
#pragma unroll
        for (int m = 0; m < M; m++) {
            if (CHUNKED) read(carry[m], p.adjoints + states(j * p.batch + batch, m), m, true);
            else if (p.dlast_state) read(carry[m], p.dlast_state + all_states(batch, m), m, wide);
            else
#pragma unroll
                for (int k = 0; k < K; k++) carry[m][k] = 0;
        }
        i64 begin = j * p.chunk, end = begin + p.chunk < p.length ? begin + p.chunk : p.length;
        for (i64 t = (end - 1) / TILE * TILE; t >= begin && end > 0; t -= TILE) tile(t, at_most(TILE, end - t));
        if (!p.dinitial_state || j > 0) return;
#pragma unroll
        for (int m = 0; m < M; m++)
            if (at.alive(m)) store_row(p.dinitial_state + all_states(batch, m), carry[m], at.rank, wide);
    }

    // The sums over time of a run.
    __device__ __forceinline__ void leave(i64 run) {
#pragma unroll
        for (int m = 0; m < M; m++) {
            if (!at.alive(m)) continue;
            store_row(p.part_a + states(run, m), da[m], at.rank, true);
            if constexpr (CONSTANT_B) store_row(p.part_const_b + states(run, m), db[m], at.rank, true);
            if constexpr (CONSTANT_C) store_row(p.part_const_c + states(run, m), dc[m], at.rank, true);
        }
        if (SLABS && !p.last_slab) return;
#pragma unroll
        for (int i = 0; i < OWN; i++) {
#pragma unroll
            for (int apart = WIDTH; apart < 32; apart *= 2) {
                dd[i] += __shfl_xor_sync(0xffffffff, dd[i], apart);
                dbias[i] += __shfl_xor_sync(0xffffffff, dbias[i], apart);
            }
            i64 place = run * p.channels + at.channel + at.owned(i);
            if ((WIDTH < 32 && at.lane >= WIDTH) || !at.mine(i)) continue;
            if (HAS_D) p.part_d[place] = dd[i];
            if (HAS_BIAS) p.part_bias[place] = dbias[i];
        }
    }
};

#endif

extern "C" __global__ void __launch_bounds__(THREADS, MIN) selective_scan_backward(const __grid_constant__ Params p) {
    extern __shared__ __align__(32) char memory[];
    Shared& shared = *(Shared*)memory;
    i64 run = blockIdx.x / (p.sections * p.section_blocks), j = p.first_chunk + run % p.some_chunks;
    run /= p.some_chunks;
#if PASS == 1
    Ends ends(p, shared, run, j);
    ends.run();
#else
    Gradients gradients(p, shared, j);
    i64 end = (run + 1) * p.batches < p.batch ? (run + 1) * p.batches : p.batch;
    for (i64 batch = run * p.batches; batch < end; batch++) gradients.one(batch);
    gradients.leave(CHUNKED ? j * p.batch + run : run);
#endif
}
