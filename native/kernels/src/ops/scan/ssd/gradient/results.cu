// The outputs dx, dz, dB and dC of gradient.cu.

// dx and dz of a warp's steps from u = dx / delta before the skip, and from y before skip and gate. They overwrite the
// states in shared memory. Also sums x u over each step, and dy x over each row of the head.
__device__ __forceinline__ void finish(Stage& stage, Parts& parts, const Params& p, const Work& at, int head,
                                       const Rows& u, const Rows& y) {
    float input[2] = {};
#pragma unroll
    for (int n = 0; n < OWN_WIDTH / 8; n++) {
        int column = at.column * OWN_WIDTH + sum_column(n);
        float d[2] = {}, skip[2] = {};
        if (SKIP) {
            const float* from = p.d + (p.wide_skip ? (i64)head * WIDTH + column : head);
            d[0] = from[0], d[1] = from[p.wide_skip];
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int i = at.row + sum_row(0, half), to = i * WIDTH_APART + column;
            float x[2], dy[2], z[2], dx[2], dz[2], delta = stage.delta[i];
            widen(stage.x + to, x[0], x[1]);
            widen(stage.dy + to, dy[0], dy[1]);
            if (GATE) widen(stage.z + to, z[0], z[1]);
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float of_u = u[0][n][2 * half + e], before_gate = dy[e];
                if (GATE) {
                    dz[e] = dy[e] * fmaf(d[e], x[e], y[0][n][2 * half + e]) * silu_slope(z[e]);
                    before_gate *= silu(z[e]);
                }
                dx[e] = fmaf(delta, of_u, d[e] * before_gate);
                input[half] = fmaf(x[e], of_u, input[half]);
                skip[e] = fmaf(before_gate, x[e], skip[e]);
            }
            *(unsigned*)(stage.before + to) = pack(dx[0], dx[1]);
            if (GATE) *(unsigned*)(stage.after + to) = pack(dz[0], dz[1]);
        }
        if (SKIP) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float sum = column_sum(skip[e]);
                if (threadIdx.x % 32 < 4) parts.skip[at.row / 16][column + e] = sum;
            }
        }
    }
    write_rows(parts.input[at.column], at.row, input);
}

// Writes rows of the chunk's steps within the sequence.
__device__ __forceinline__ void write_out(STORAGE* to, const STORAGE* from, const Params& p, const Work& at, int head) {
#pragma unroll
    for (int unit = threadIdx.x; unit < CHUNK * WIDTH / 8; unit += THREADS) {
        int row = unit / (WIDTH / 8), column = unit % (WIDTH / 8) * 8;
        if (row >= at.left) continue;
        *(int4*)(to + at.step(p, row, head) * WIDTH + column) = *(const int4*)(from + row * WIDTH_APART + column);
    }
}

// Writes dB or dC of a warp's steps, or the block's partial sums where a group has several parts.
__device__ __forceinline__ void write_states(STORAGE* to, float* part, const Others& sums, const Params& p,
                                             const Work& at) {
    bool whole = p.parts == 1 || at.chunk < p.whole;
    part += (at.part * p.part_steps - p.first_part) * p.groups * STATE;
#pragma unroll
    for (int n = 0; n < OWN_STATES / 8; n++) {
        int column = at.column * OWN_STATES + sum_column(n);
        if (at.column * OWN_STATES + 8 * n >= STATE) continue;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int i = at.row + sum_row(0, half);
            if (i >= at.left) continue;
            i64 id = (at.step(i) * p.groups + at.group) * STATE + column;
            float low = sums[0][n][2 * half], high = sums[0][n][2 * half + 1];
            if (whole) *(unsigned*)(to + id) = pack(low, high);
            else *(float2*)(part + id) = {low, high};
        }
    }
}
