// The second pass of the gradient, backwards.

#if !ENDS

template <typename T>
__device__ __forceinline__ void prefetch(const T* from) { asm volatile("prefetch.global.L2 [%0];" : : "l"(from)); }

// Whether dt's gradient differs from delta's.
constexpr bool SLOPE = SOFTPLUS || (CLAMP && MASK);

// Steps whose x and dt are loaded at once: those of a tile, where registers hold them.
constexpr int AHEAD = WIDTH > 32 ? TILE * 32 / WIDTH : TILE;

struct Gradients : Thread {
    // a[t+1] g[t+1], and sums over time.
    REAL carry[M][K], da[M][K] = {}, db[CONSTANT_B ? M : 1][K] = {}, dc[CONSTANT_C ? M : 1][K] = {};
    REAL dd[OWN] = {}, dbias[OWN] = {}, skip[OWN];
    i64 j;
    Column<SUB> dt, dy, z;

    __device__ __forceinline__ Gradients(const Params& p, Shared& shared, i64 j) : Thread(p, shared), j(j) {
#pragma unroll
        for (int i = 0; i < OWN; i++) skip[i] = HAS_D && at.mine(i) ? p.d[at.channel + at.owned(i)] : REAL(0);
    }

    // The address of the states after the tile before t.
    __device__ __forceinline__ const REAL* bound(i64 t, int m) {
        return p.bounds + states(row_of(t / TILE - 1), m);
    }

    // Loads the states before the chunk, which starts at `begin`.
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

    // Loads the states before a tile that starts at t.
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
                passed[m] = at.alive(m) ? p.passed[flat(row_of(t / TILE - 1), m)] : REAL(0);
#pragma unroll
            for (int m = 0; m < M; m++) {
#pragma unroll
                for (int k = 0; k < K; k++) h[m][k] = decayed(passed[m] * a[m][k], from[m][k], h[m][k]);
            }
        }
    }

    // Prefetches the rows and the initial states of the tile at t to the L2 cache.
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

    // The inputs of step s of the tile. They are loaded one step ahead, as decays are computed, so that neither is
    // waited for.
    struct Step {
        REAL x[M], b[K], delta[M];
    };

    __device__ __forceinline__ void load_step(Step& to, int s) {
        load(to.delta, &warp.delta[s][at.local(0)]);
        load(to.x, &warp.x[s][at.local(0)]);
        load_b(to.b, s);
    }

    // The decays over step s of the tile.
    __device__ __forceinline__ void decays(REAL (&to)[M][K], int s) {
        REAL delta[M];
        load(delta, &warp.delta[s][at.local(0)]);
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int k = 0; k < K; k++) to[m][k] = decay(delta[m], m, k);
        }
    }

    // Goes forwards through the tile, and stores the states before every SUB steps.
    __device__ __forceinline__ void forwards(REAL (&h)[M][K], int left) {
        REAL kept[M][K];
        Step now;
        load_step(now, 0);
        decays(kept, 0);
        int last = (left - 1) / SUB * SUB;
#pragma unroll 1
        for (int s = 0; s < last; s++) {
            if (s % SUB == 0) keep(h, s / SUB);
            Step next;
            load_step(next, s + 1);
#pragma unroll
            for (int m = 0; m < M; m++) {
                REAL u = now.delta[m] * now.x[m];
#pragma unroll
                for (int k = 0; k < K; k++) {
                    h[m][k] = fma(kept[m][k], h[m][k], there(m, k) ? u * b_of(now.b, m, k) : REAL(0));
                    kept[m][k] = decay(next.delta[m], m, k);
                }
            }
            now = next;
        }
        keep(h, last / SUB);
    }

    __device__ __forceinline__ void keep(const REAL (&h)[M][K], int slot) {
#pragma unroll
        for (int m = 0; m < M; m++) store(&warp.slots[slot][(m * 32 + at.lane) * K], h[m]);
    }

    __device__ __forceinline__ void fetch_columns(Column<AHEAD>& x, Column<AHEAD>& dt, i64 place, int left) {
        if (left >= AHEAD) {
            x.template fetch<true>(p.x + place, p, at, left);
            dt.template fetch<true>(p.dt + place, p, at, left);
        } else {
            x.template fetch<false>(p.x + place, p, at, left);
            dt.template fetch<false>(p.dt + place, p, at, left);
        }
    }

    template <bool WHOLE>
    __device__ __forceinline__ void fetch(i64 place, int left) {
        dy.template fetch<WHOLE>(p.dy + place, p, at, left);
        if (SLOPE) dt.template fetch<WHOLE>(p.dt + place, p, at, left);
        if (HAS_Z) z.template fetch<WHOLE>(p.z + place, p, at, left);
    }

    // Sums the terms of two steps for each of the lane's states over the channels of the warp, and stores the sums in
    // `slot`: which = 0 for dB, 1 for dC.
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

    // Sums the values of each of the thread's channels over the lanes that share their states, and stores the sums:
    // each set APART rows after the previous one.
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

    // Recomputes SUB steps forwards in registers, from step s of the tile, which is time t, and goes back through them.
    // `left` is the number of them that exist: padding steps have zeros as inputs, and keep states and adjoints. `kept` has
    // the decays of these steps, and gets those of the SUB steps before, so that no exponential is waited for.
    __device__ __forceinline__ void sub(REAL (&kept)[SUB][M][K], int s, i64 t, int left) {
        REAL grown[SUB][M][K], h[M][K];
        int before = s > 0 ? s - SUB : 0;
        REAL* slot = warp.slots[s / SUB];
#pragma unroll
        for (int m = 0; m < M; m++) load(h[m], slot + (m * 32 + at.lane) * K);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < SUB; i += 2) {
            REAL over[1][2 * K] = {}, y[2][M] = {};
#pragma unroll
            for (int e = 0; e < 2; e++) {
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
                        REAL from = kept[i + e][m][k] * h[m][k];
                        grown[i + e][m][k] = from;
                        h[m][k] = there(m, k) ? fma(u, b_of(b, m, k), from) : REAL(0);
                        if constexpr (CONSTANT_C) add_if(i + e < left, dy[m], h[m][k], dc[m][k]);
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
            // over[0] is the gradient of the input delta x, over[1] that of delta through decays, times log2(e).
            REAL over[2][M], delta[M], x[M], dy[M], b[K], c[K], next[M];
            load(delta, &warp.delta[s + i][at.local(0)]);
            load(x, &warp.x[s + i][at.local(0)]);
            load(dy, &warp.dy[i][at.local(0)]);
            load(next, &warp.delta[before + i][at.local(0)]);
            load_b(b, s + i);
            load_c(c, s + i);
#pragma unroll
            for (int m = 0; m < M; m++) {
                REAL u = delta[m] * x[m], from_states[K];
                if (DSTATES && i < left) read(from_states, p.dstates + all_states(time(t + i), m), m, wide);
#pragma unroll
                for (int k = 0; k < K; k++) {
                    REAL g = fma(dy[m], c_of(c, m, k), carry[m][k]);
                    if (DSTATES && i < left) g += from_states[k];
                    if (!there(m, k)) g = 0;
                    carry[m][k] = kept[i][m][k] * g;
                    kept[i][m][k] = decay(next[m], m, k);
                    REAL w = g * grown[i][m][k], &for_b = of_b[0][i % 2 * K + k];
                    over[1][m] = plus(k == 0, w, a[m][k], over[1][m]);
                    add_if(i < left, w, delta[m], da[m][k]);
                    over[0][m] = plus(k == 0, g, b_of(b, m, k), over[0][m]);
                    if constexpr (CONSTANT_B) add_if(i < left, g, u, db[m][k]);
                    else for_b = plus(m == 0, g, u, for_b);
                }
            }
            over_states<SUB>(over, &warp.sums[0][i]);
            if constexpr (!CONSTANT_B)
                if (i % 2 == 0) over_channels(of_b, slot, i, 0);
        }
    }

    // Turns the sums over states into gradients. `dy`, `dt` and `z` have the inputs of these steps.
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

    // Adds the sums of previous slabs, and stores them for the next one unless this is the last; returns whether it is.
    __device__ __forceinline__ bool all_slabs(i64 flat, REAL& of_input, REAL& of_decay, REAL& y) {
        i64 plane = p.steps * p.channels;
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
        int s = (count - 1) / SUB * SUB, left = count - s;
        i64 place = time(t + s) * p.channels + at.first(p);
        REAL kept[SUB][M][K];
#pragma unroll
        for (int i = 0; i < SUB; i++) {
            decays(kept[i], s + i);
            // Not by a delta of 0, since 0 times infinity is NaN.
            if (i < left) continue;
#pragma unroll
            for (int m = 0; m < M; m++) {
#pragma unroll
                for (int k = 0; k < K; k++) kept[i][m][k] = 1;
            }
        }
        fetch<false>(place, left);
#pragma unroll 1
        for (; s >= 0; s -= SUB, place -= SUB * p.channels, left = SUB) back(kept, s, t, place, left);
    }

    // SUB steps backwards, from step s of the tile; `place` is the offset of the thread's first element.
    __device__ __forceinline__ void back(REAL (&kept)[SUB][M][K], int s, i64 t, i64 place, int left) {
        __syncwarp();
        prepare_dy(dy, z);
        Column<SUB> this_dy = dy, this_dt = dt, this_z = z;
        __syncwarp();
        if (s > 0) fetch<true>(place - SUB * p.channels, SUB);
        sub(kept, s, t + s, left);
        __syncwarp();
        if (left == SUB) finish<true>(this_dy, this_dt, this_z, s, place, left);
        else finish<false>(this_dy, this_dt, this_z, s, place, left);
    }

    // Sums dB and dC of a tile over warps, and writes them, or the block's partial sums where a group has several
    // blocks.
    __device__ __forceinline__ void sum_warps(i64 t, int left) {
        constexpr int PER_STEP = 2 * PADDED;
        for (int i = threadIdx.x; i < left * PER_STEP; i += THREADS) {
            int step = i / PER_STEP, within = i % PER_STEP, which = within / PADDED, n = within % PADDED;
            if (n >= N || (which == 0 ? CONSTANT_B : CONSTANT_C)) continue;
            REAL sum = 0;
#pragma unroll
            for (int w = 0; w < WARPS; w++) sum += shared.warps[w].slots[step / SUB][step % SUB * PER_STEP + within];
            REAL* part = which == 0 ? p.part_b : p.part_c;
            if (part) {
                i64 row = Place::block(p) * p.steps + time(t + step);
                if (!PACKED) row = (Place::block(p) * p.batch + batch) * p.span + t + step - p.first_chunk * p.chunk;
                part[row * N + n] = sum;
            } else {
                i64 groups = which == 0 ? p.groups_b : p.groups_c, share = which == 0 ? p.share_b : p.share_c;
                i64 row = time(t + step) * groups + (groups > 1 ? at.corner() / share : 0);
                narrow(sum, (which == 0 ? p.db : p.dc)[row * p.state + p.first_state + n]);
            }
        }
    }

    __device__ __forceinline__ void tile(i64 t, int left) {
        Rows<TILE> b, c;
        if (!CONSTANT_B) b.fetch(rows(p.b, p.groups_b, p.share_b, time(t)), p.groups_b * p.state, left);
        if (!CONSTANT_C) c.fetch(rows(p.c, p.groups_c, p.share_c, time(t)), p.groups_c * p.state, left);
        Column<AHEAD> x, dt;
        i64 place = time(t) * p.channels + at.first(p);
        fetch_columns(x, dt, place, left);
        REAL h[M][K];
        start(h, t);
        if (!CONSTANT_B) b.spread(shared.b);
        if (!CONSTANT_C) c.spread(shared.c);
        prepare(dt, x, 0, left);
#pragma unroll 1
        for (int s = AHEAD; s < TILE; s += AHEAD) {
            fetch_columns(x, dt, place + s * p.channels, left - s);
            prepare(dt, x, s, left - s);
        }
        __syncthreads();
        forwards(h, left);
        if (t > j * p.chunk) announce(t - TILE);
        backwards(t, left);
        __syncthreads();
        if (!CONSTANT_B || !CONSTANT_C) {
            sum_warps(t, left);
            __syncthreads();
        }
    }

    // Processes one batch, or one chunk of it.
    __device__ __forceinline__ void one(i64 which) {
        take(which);
        i64 begin = j * p.chunk, end = begin + p.chunk < length() ? begin + p.chunk : length();
        if (PACKED && j > 0 && begin >= end) return;
#pragma unroll
        for (int m = 0; m < M; m++) {
            // An empty packed sequence has no chunk that passes its adjoint on.
            if (CHUNKED && !(PACKED && end == 0)) read(carry[m], p.adjoints + states(j * p.batch + batch, m), m, true);
            else if (p.dlast_state) read(carry[m], p.dlast_state + all_states(batch, m), m, wide);
            else
#pragma unroll
                for (int k = 0; k < K; k++) carry[m][k] = 0;
        }
        for (i64 t = (end - 1) / TILE * TILE; t >= begin && end > 0; t -= TILE) tile(t, at_most(TILE, end - t));
        if (!p.dinitial_state || j > 0) return;
#pragma unroll
        for (int m = 0; m < M; m++)
            if (at.alive(m)) store_row(p.dinitial_state + all_states(batch, m), carry[m], at.rank, wide);
    }

    // Writes a run's partial sums over time.
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
