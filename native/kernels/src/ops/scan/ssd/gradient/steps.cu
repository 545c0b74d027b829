// From the partial sums: ddt, and the chunk's parts of dA, dD and ddt_bias. A single warp computes them, with two steps
// per lane.

template <int PARTS, int LENGTH>
__device__ __forceinline__ float sum_parts(const float (&parts)[PARTS][LENGTH], int at) {
    float sum = 0;
#pragma unroll
    for (int part = 0; part < PARTS; part++) sum += parts[part][at];
    return sum;
}

// Inclusive suffix sums, of two steps per lane, in place.
__device__ __forceinline__ void sum_later(float (&of)[2]) {
    int lane = threadIdx.x % 32;
    float sum = of[0] + of[1];
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        float other = __shfl_down_sync(~0u, sum, distance);
        if (lane + distance < 32) sum += other;
    }
    float after = __shfl_down_sync(~0u, sum, 1);
    of[1] += lane < 31 ? after : 0.0f;
    of[0] += of[1];
}

// Exclusive prefix sums, of two steps per lane, in place.
__device__ __forceinline__ void sum_earlier(float (&of)[2]) {
    int lane = threadIdx.x % 32;
    float sum = of[0] + of[1];
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        float other = __shfl_up_sync(~0u, sum, distance);
        if (lane >= distance) sum += other;
    }
    float before = __shfl_up_sync(~0u, sum, 1), first = of[0];
    of[0] = lane > 0 ? before : 0.0f;
    of[1] = of[0] + first;
}

// Contributions across each of two steps, from earlier ones to itself and later ones: those that warps summed among the
// columns that have the step, and the rows of the columns before these.
__device__ __forceinline__ void across_steps(float (&to)[2], const Parts& parts) {
    int first = threadIdx.x % 32 * 2;
    float rows[2] = {};
#pragma unroll
    for (int e = 0; e < 2; e++) to[e] = sum_parts(parts.within, first + e);
#pragma unroll
    for (int part = 0; part + 1 < SPLIT; part++) {
        float sums[2];
#pragma unroll
        for (int e = 0; e < 2; e++) sums[e] = rows[e] += parts.rows[part][first + e];
        sum_later(sums);
#pragma unroll
        for (int e = 0; e < 2; e++)
            if (first / SCORES == part + 1) to[e] += sums[e];
    }
}

// Contributions through the decay of each of two steps, from S and earlier steps to itself, later ones and G.
__device__ __forceinline__ void through_decays(float (&to)[2], const Parts& parts, const Stage& stage) {
    float later[2], earlier[2], all = 0;
#pragma unroll
    for (int e = 0; e < 2; e++) {
        int i = threadIdx.x % 32 * 2 + e;
        later[e] = sum_parts(parts.from_state, i);
        earlier[e] = sum_parts(parts.to_state, i);
    }
    sum_later(later);
    sum_earlier(earlier);
    across_steps(to, parts);
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) all += parts.through[warp];
    all *= exp2_fast(stage.decay[CHUNK - 1]);
#pragma unroll
    for (int e = 0; e < 2; e++) to[e] += all + later[e] + earlier[e];
}

// The chunk's part of dD. `run` is the index of the chunk and the head.
__device__ __forceinline__ void write_skip(const Parts& parts, const Params& p, i64 run) {
    float sum = 0;
#pragma unroll
    for (int column = threadIdx.x % 32; column < WIDTH; column += 32) {
        float of_row = sum_parts(parts.skip, column);
        if (p.wide_skip) p.part_d[run * WIDTH + column] = of_row;
        sum += of_row;
    }
    sum = warp_sum(sum);
    if (!p.wide_skip && threadIdx.x % 32 == 0) p.part_d[run] = sum;
}

__device__ __forceinline__ void write_steps(const Parts& parts, const Stage& stage, const Params& p, const Work& at,
                                            int head) {
    float through[2], a = p.a[head], bias = HAS_BIAS ? p.dt_bias[head] : 0.0f, da = 0, dbias = 0;
    through_decays(through, parts, stage);
#pragma unroll
    for (int e = 0; e < 2; e++) {
        int i = threadIdx.x % 32 * 2 + e;
        if (i >= at.left) continue;
        i64 id = at.step(p, i, head);
        float ddelta = fmaf(a, through[e], sum_parts(parts.input, i));
        float ddt = ddelta * step_slope(widen(p.dt[id]), bias, p.lo, p.hi);
        narrow(ddt, p.ddt[id]);
        da = fmaf(stage.delta[i], through[e], da);
        dbias += ddt;
    }
    da = warp_sum(da), dbias = warp_sum(dbias);
    i64 run = at.of_head(p, head);
    if (threadIdx.x % 32 == 0) {
        p.part_a[run] = da;
        if (HAS_BIAS) p.part_bias[run] = dbias;
    }
    if (SKIP) write_skip(parts, p, run);
}
