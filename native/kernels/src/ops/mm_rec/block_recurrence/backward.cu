// The gradient: blocks exchange the gradients of the gates' pre-activations. `first` and `second` hold pre-activations
// of times that are still to come, and gradients of times that are done.

struct Read { REAL z, gamma, h, dh, first, second; };

__device__ __forceinline__ Read read(const Params& p, const Place& place, const Item& item, i64 t) {
    Read of = {};
    if (!item.there) return of;
    i64 at = item.at(p, place, t);
    of.z = widen(p.z[at]);
    of.gamma = widen(p.gamma[at]);
    of.h = p.before[at];
    of.dh = widen(p.dh[at]);
    of.first = p.first[at] + widen(p.b_gate[item.column]);
    if (GATES == 2) of.second = p.second[at] + widen(p.b_mix[item.column]);
    return of;
}

// What a step needs to go back through clip and norm: g, the gradient of the clipped state, 0 outside of the bounds; u;
// the gates s and m; the norm's divisor.
struct Reached { REAL g, u, s, m, size; };

__device__ __forceinline__ Reached reach(const Params& p, const Place& place, const Item& item, int index, i64 t, const Read& of) {
    Reached to;
    to.s = sigmoid(of.first);
    to.m = GATES == 2 ? sigmoid(of.second) : (REAL)0;
    to.u = gated(p, of.z, of.gamma, of.h, to.s, to.m);
    to.size = NORM ? p.sizes[(place.sequence + item.batch) * p.length + t] : (REAL)1;
    REAL g = state().carry[index] + total(item.own, item.batch) + of.dh;
    to.g = fabs(to.u / to.size) > p.clip ? (REAL)0 : g;
    return to;
}

// One step of one column, given g, the gradient of u.
__device__ __forceinline__ void step(const Params& p, const Place& place, const Item& item, int index, i64 t, const Read& of,
                                     const Reached& reached, REAL g) {
    i64 at = item.at(p, place, t);
    REAL s = reached.s, m = reached.m, mixed = GATES == 2 ? p.mix * g : (REAL)0, all = g + mixed;
    REAL ds = g * of.z * s * (1 - s), dm = mixed * (of.z - of.h) * m * (1 - m);
    state().fresh[0][index] = p.first[at] = ds;
    if (GATES == 2) state().fresh[GATES - 1][index] = p.second[at] = dm;
    p.dz[at] = fma(mixed, m, g * s);
    narrow(all * of.h, p.dgamma[at]);
    state().carry[index] = fma(all, of.gamma, mixed * (1 - m));
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) recurrence_backward(Params p) {
    Place place(p);
    Weights weights(p, place);
    start(p, place, nullptr);
    for (int i = threadIdx.x; i < ITEMS; i += THREADS) {
        Item item(p, place, i);
        state().carry[i] = item.there && p.dlast_state ? p.dlast_state[item.of_state(p, place)] : (REAL)0;
    }
    __syncthreads();
    unsigned meetings = 0;
    // Another block's shared memory may be written only once that block has started.
    if (CLUSTER) meet(p, meetings);
    int now = 0;
    for (i64 t = p.length - 1; t >= 0; --t) {
        int next = now ^ 1;
        Read reads[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) reads[i] = read(p, place, Item(p, place, threadIdx.x + i * THREADS), t);
        product(weights, place, CLUSTER ? now : 0);
        __syncthreads();
#if NORM
        Reached reached[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            int index = threadIdx.x + i * THREADS;
            Item item(p, place, index);
            if (!item.there) continue;
            reached[i] = reach(p, place, item, index, t, reads[i]);
            state().fresh[0][index] = reached[i].g * reached[i].u;
        }
        __syncthreads();
        sum_over_group(p, place, meetings, next, [&](int i) { return state().fresh[0][i]; });
#endif
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            int index = threadIdx.x + i * THREADS;
            Item item(p, place, index);
            if (!item.there) continue;
#if NORM
            REAL size = reached[i].size, root = size - EPS;
            REAL slope = root > 0 ? state().norm[item.batch] / ((REAL)p.width * root * size * size) : (REAL)0;
            step(p, place, item, index, t, reads[i], reached[i], reached[i].g / size - reached[i].u * slope);
#else
            Reached reached = reach(p, place, item, index, t, reads[i]);
            step(p, place, item, index, t, reads[i], reached, reached.g);
#endif
        }
        __syncthreads();
        give(p, place, next);
        meet(p, meetings);
        take(p, next);
        now = next;
    }
    if (!p.dinitial_state) return;
    product(weights, place, CLUSTER ? now : 0);
    __syncthreads();
    for (int i = threadIdx.x; i < ITEMS; i += THREADS) {
        Item item(p, place, i);
        if (item.there) p.dinitial_state[item.of_state(p, place)] = state().carry[i] + total(item.own, item.batch);
    }
}
