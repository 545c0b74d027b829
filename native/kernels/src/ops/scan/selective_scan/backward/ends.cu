// The first pass of the gradient, forwards.

#if ENDS

struct Ends : Thread {
    REAL h[M][K] = {}, product[CHUNKED ? M : 1][K], adjoint[CHUNKED ? M : 1][K] = {}, sum[M] = {};
    i64 j;
    // The offset of the thread's first element of the next steps.
    i64 place;
    const STORAGE *from_b, *from_c;
    Column<STAGE> x, dt, dy, z;
    Rows<STAGE> b, c;

    __device__ __forceinline__ Ends(const Params& p, Shared& shared, i64 which, i64 j) : Thread(p, shared), j(j) {
        take(which);
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

    // Issues the loads of the next STAGE steps.
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
            if (DSTATES && CHUNKED) read(from_states, p.dstates + all_states(time(t), m), m, wide);
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

    // Stores the state after a tile, and the sum of deltas so far.
    __device__ __forceinline__ void keep(i64 tile, bool last) {
        i64 row = row_of(tile);
#pragma unroll
        for (int m = 0; m < M; m++) {
            if (!at.alive(m)) continue;
            if (!last) store_row(p.bounds + states(row, m), h[m], at.rank, true);
            if (CHUNKED && at.rank == 0) p.passed[flat(row, m)] = sum[m];
        }
    }

    __device__ __forceinline__ void run() {
        i64 begin = j * p.chunk, end = begin + p.chunk < length() ? begin + p.chunk : length();
        if (PACKED && begin >= end) return;
        int buffer = 0;
        place = time(begin) * p.channels + at.first(p);
        from_b = rows(p.b, p.groups_b, p.share_b, time(begin)), from_c = rows(p.c, p.groups_c, p.share_c, time(begin));
        fetch(at_most(STAGE, end - begin));
        for (i64 t = begin; t < end; t += STAGE, buffer ^= STAGE) {
            int left = at_most(STAGE, end - t);
            if (t > begin && t % TILE == 0) keep(t / TILE - 1, false);
            // Rows of B and C are double buffered, so one barrier per stage is enough: the buffer written now was last
            // read before the barrier of the stage before.
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
        if constexpr (CHUNKED) finish((end - 1) / TILE, end == length());
    }

    __device__ __forceinline__ void finish(i64 tile, bool last) {
        keep(tile, last);
        i64 row = j * p.batch + batch;
#pragma unroll
        for (int m = 0; m < M; m++)
            if (at.alive(m)) store_row(p.adjoints + states(row, m), adjoint[m], at.rank, true);
    }
};

#endif
