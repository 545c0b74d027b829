// The recurrence: blocks exchange states, or with NORM u, which every block then normalises.

struct Read { REAL z, gamma, bias, of_z; };

__device__ __forceinline__ Read read(const Params& p, const Place& place, const Item& item, i64 t) {
    Read of = {};
    if (!item.there) return of;
    i64 at = item.at(p, place, t);
    of.z = widen(p.z[at]);
    of.gamma = widen(p.gamma[at]);
    of.bias = widen(p.b_gate[item.column]);
    if (GATES == 2) of.of_z = p.of_z[at] + widen(p.b_mix[item.column]);
    return of;
}

__device__ __forceinline__ void write(const Params& p, const Place& place, const Item& item, i64 t, REAL h) {
    narrow(h, p.to[item.at(p, place, t)]);
    if (t == p.length - 1) p.last[item.of_state(p, place)] = h;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) recurrence_forward(Params p) {
    Place place(p);
    Weights weights(p, place);
    start(p, place, p.initial_state);
    __syncthreads();
    for (int i = threadIdx.x; i < ITEMS; i += THREADS) {
        Item item(p, place, i);
        state().carry[i] = item.there ? state().vectors[0][item.batch][item.column] : (REAL)0;
    }
    unsigned meetings = 0;
    // Another block's shared memory may be written only once that block has started.
    if (CLUSTER) meet(p, meetings);
    for (i64 t = 0; t < p.length; ++t) {
        int now = CLUSTER ? t & 1 : 0, next = (t + 1) & 1;
        Read reads[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) reads[i] = read(p, place, Item(p, place, threadIdx.x + i * THREADS), t);
        product(weights, place, now);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            int index = threadIdx.x + i * THREADS;
            Item item(p, place, index);
            if (!item.there) continue;
            Read& of = reads[i];
            REAL s = sigmoid(total(item.own * GATES, item.batch) + of.bias);
            REAL m = GATES == 2 ? sigmoid(total(item.own * GATES + GATES - 1, item.batch) + of.of_z) : (REAL)0;
            REAL h = gated(p, of.z, of.gamma, state().carry[index], s, m);
            if (!NORM) {
                h = within(h, p.clip);
                state().carry[index] = h;
                write(p, place, item, t, h);
            }
            state().fresh[0][index] = h;
        }
        __syncthreads();
        if (!NORM && t == p.length - 1) break;
        give(p, place, next);
#if NORM
        sum_over_group(p, place, meetings, next, [&](int i) { return state().fresh[0][i] * state().fresh[0][i]; });
        take(p, next);
        auto normed = [&](REAL u, int batch) {
            return within(u / (sqrt(state().norm[batch] / (REAL)p.width) + EPS), p.clip);
        };
        for (int i = threadIdx.x; i < ITEMS; i += THREADS) {
            Item item(p, place, i);
            if (!item.there) continue;
            state().carry[i] = normed(state().fresh[0][i], item.batch);
            write(p, place, item, t, state().carry[i]);
        }
        for (int i = threadIdx.x; i < BATCH * (int)p.width; i += THREADS) {
            REAL& u = state().vectors[CLUSTER ? next : 0][i / p.width][i % p.width];
            u = normed(u, i / p.width);
        }
        __syncthreads();
#else
        meet(p, meetings);
        take(p, next);
#endif
    }
}
